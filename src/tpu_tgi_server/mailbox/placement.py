"""Which agent holds which live request. Pure bookkeeping: it sends nothing, and agents are numbers here.

The router's batches are made up anew on each agent: the requests of one Prefill that go to the same agent are a *part*,
which the agent knows as a batch with an id of its own.

A request whose agent has died is *homeless*. It can be given to another agent as if it were new: its tokens are a
function of the request, so what it has brought already comes again, and is left out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from loguru import logger

from tpu_tgi_server.engine.batches import BatchTable
from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    FinishReason,
    GeneratedText,
    Generation,
    Request,
    Tokens,
)
from tpu_tgi_server.engine.validation import check_batch

MAX_MOVES_IN_VAIN = 2
"""A request that moves more often without a new token would have lost three agents, and its neighbours with it."""


@dataclass(frozen=True)
class Part:
    """The requests that one agent holds of one of the router's Prefills."""

    agent: int
    id: int


@dataclass
class Resident:
    """A live request: where it is, and what it has brought.

    Attributes:
        part: None if it is homeless.
        tokens: id, and text without special tokens, of each token that the router has been given.
        num_repeated: how many tokens the present agent has brought.
        num_moves_in_vain: how often it has moved since the last token that was new.
    """

    request: Request
    part: Part | None
    tokens: list[tuple[int, str]] = field(default_factory=list)
    num_repeated: int = 0
    num_moves_in_vain: int = 0


class Placement:
    """Owns the router's batches, and for each of their requests the part that it is in.

    Args:
        max_total_tokens: what a request reserves of the router's token budget.
    """

    def __init__(self, num_slots: Sequence[int], max_total_tokens: int) -> None:
        self._num_slots = num_slots
        self._max_total_tokens = max_total_tokens
        self._batches = BatchTable()
        self._residents: dict[int, Resident] = {}
        self._part_ids = count()

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def check(self, batch: Batch) -> None:
        """Refuse what no single agent can see: ids that live on another one.

        Raises:
            EngineError: INVALID.
        """
        if batch.id in self._batches:
            raise EngineError(ErrorKind.INVALID, f"batch {batch.id} is already live")
        check_batch(batch, self._residents.keys())

    def split(
        self, requests: Iterable[Request], agents: Collection[int], may_wait: bool = True
    ) -> dict[Part, tuple[Request, ...]]:
        """Each request to the agent with the most free slots, counting who runs and who waits. Enters nothing.

        Requests that would have to wait there are left out unless they may.
        """
        num_free = {agent: self._num_slots[agent] - self._num_residents(agent) for agent in agents}
        chosen: dict[int, list[Request]] = {}
        for request in requests:
            emptiest = max(num_free, key=num_free.__getitem__)
            if num_free[emptiest] <= 0 and not may_wait:
                break
            num_free[emptiest] -= 1
            chosen.setdefault(emptiest, []).append(request)
        return {Part(agent, next(self._part_ids)): tuple(members) for agent, members in chosen.items()}

    def add(self, batch: Batch, parts: Mapping[Part, Sequence[Request]]) -> None:
        """Enter a new batch, which agents are to hold in these parts."""
        self._batches.add(batch.id, (request.id for request in batch.requests))
        for part, requests in parts.items():
            self._residents.update((request.id, Resident(request, part)) for request in requests)

    def merge(self, batches: Sequence[CachedBatch]) -> dict[Part, list[int]]:
        """Make the router's batches one under the id of the first, with the requests that they name.

        Returns:
            What each part that the batches had still has; maybe nothing.

        Raises:
            EngineError: as `BatchTable.merge`.
        """
        before = [id for batch in batches for id in self._batches.request_ids(batch.id)]
        parts = self._parts(before)
        self._forget(self._batches.merge(batches))
        return {part: [id for id in ids if id in self._residents] for part, ids in parts.items()}

    def join(self, parts: Sequence[Part]) -> None:
        """Enter that an agent has made its parts one, under the id of the first."""
        for resident in self._residents.values():
            if resident.part in parts:
                resident.part = parts[0]

    def keep(self, batch_id: int, request_ids: Collection[int]) -> dict[Part, list[int]]:
        """Keep only these requests of a batch; what each part that it had still has."""
        parts = self._parts(self._batches.request_ids(batch_id))
        self._forget(self._batches.keep(batch_id, request_ids))
        return {part: [id for id in ids if id in self._residents] for part, ids in parts.items()}

    def clear(self) -> None:
        """Forget all."""
        self._batches.clear()
        self._residents.clear()

    def evict(self, agent: int) -> None:
        """Make the requests of a dead agent homeless."""
        for resident in self._residents.values():
            if resident.part is not None and resident.part.agent == agent:
                resident.part = None

    def homeless(self, batch_id: int) -> list[Request]:
        """The requests of a batch that no agent holds."""
        members = (self._residents[id] for id in self._batches.request_ids(batch_id))
        return [resident.request for resident in members if resident.part is None]

    def is_stuck(self, request_id: int) -> bool:
        """Whether a request has brought nothing new from MAX_MOVES_IN_VAIN agents: it may be what they die of."""
        return self._residents[request_id].num_moves_in_vain >= MAX_MOVES_IN_VAIN

    def move(self, part: Part, requests: Iterable[Request]) -> None:
        """Enter that homeless requests are to begin anew as a part of a living agent."""
        for request in requests:
            resident = self._residents[request.id]
            resident.part, resident.num_repeated = part, 0
            resident.num_moves_in_vain += 1

    def take(self, batch_id: int, generations: Iterable[Generation]) -> list[Generation]:
        """What is new of an agent's generations for a batch, entered as brought. Requests that end are forgotten."""
        taken = [self._take(self._residents[generation.request_id], generation) for generation in generations]
        new = [generation for generation in taken if generation is not None]
        self._forget(generation.request_id for generation in new if generation.generated_text is not None)
        self._batches.keep(batch_id, self._residents.keys())
        return new

    def cached_batch(self, batch_id: int) -> CachedBatch | None:
        """A batch as the router is told of it; None if nothing is left of it."""
        ids = self._batches.request_ids(batch_id)
        return CachedBatch(batch_id, ids, len(ids) * self._max_total_tokens) if ids else None

    def _num_residents(self, agent: int) -> int:
        parts = (resident.part for resident in self._residents.values())
        return sum(part is not None and part.agent == agent for part in parts)

    def _parts(self, request_ids: Iterable[int]) -> dict[Part, list[int]]:
        parts: dict[Part, list[int]] = {}
        for id in request_ids:
            part = self._residents[id].part
            if part is not None:
                parts.setdefault(part, []).append(id)
        return parts

    def _take(self, resident: Resident, generation: Generation) -> Generation | None:
        ids = generation.tokens.ids
        start = resident.num_repeated
        known = [id for id, _ in resident.tokens[start : start + len(ids)]]
        resident.num_repeated += len(ids)
        num_known = len(known)
        if list(ids[:num_known]) != known or (num_known == len(ids) and generation.generated_text is not None):
            return _end_early(resident)
        if num_known == len(ids):
            return None
        new = _without_first(generation, num_known) if num_known else generation
        tokens = new.tokens
        texts = ("" if is_special else text for text, is_special in zip(tokens.texts, tokens.is_special, strict=True))
        resident.tokens += zip(tokens.ids, texts, strict=True)
        resident.num_moves_in_vain = 0
        return new

    def _forget(self, request_ids: Iterable[int]) -> None:
        for id in request_ids:
            del self._residents[id]


def _without_first(generation: Generation, num_tokens: int) -> Generation:
    """A generation less its first tokens, and less the details of the prompt, which came with them."""
    tokens = generation.tokens
    return generation._replace(
        tokens=Tokens(
            tokens.ids[num_tokens:],
            tokens.logprobs[num_tokens:],
            tokens.texts[num_tokens:],
            tokens.is_special[num_tokens:],
        ),
        prefill_tokens=None,
        top_tokens=generation.top_tokens[num_tokens:],
    )


def _end_early(resident: Resident) -> Generation:
    """The end of a request that cannot be repeated: a rounding error has led to another token than the first time.

    The protocol has no error of a single request. LENGTH makes TGI's routers from 3.2 on go on with the text so far as
    a new request; older ones end the answer. A router takes no end without a token, so the last comes again, empty.
    """
    request = resident.request
    logger.warning("request {} moved to another agent and took another way there, so it ends early", request.id)
    last_id = resident.tokens[-1][0]
    text = GeneratedText(
        text="".join(text for _, text in resident.tokens),
        num_generated_tokens=len(resident.tokens) + 1,
        finish_reason=FinishReason.LENGTH,
        seed=request.sampling.seed if request.sampling.is_sampled else None,
    )
    top_tokens = (Tokens((), (), (), ()),) if request.top_n_tokens else ()
    return Generation(request.id, Tokens((last_id,), (0.0,), ("",), (True,)), None, text, top_tokens)
