"""The root's mailbox: the agents as if they were one, as coroutines that never block the event loop.

Each request lives on one agent. A call goes at once to every agent that it concerns, and their answers become one.
Calls are carried out one after the other, in the order in which they are made.

The requests of an agent that dies begin anew where there is a free slot, as part of a Decode; what they have brought is
not told twice. With no other agent alive, calls in flight fail, and all batches are unknown from then on.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from loguru import logger

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.types import Batch, CachedBatch, ModelInfo, Request, StepResult
from tpu_tgi_server.mailbox.messages import Clear, Decode, Done, Filter, Filtered, Prefill, Progress
from tpu_tgi_server.mailbox.placement import Part, Placement
from tpu_tgi_server.mailbox.process import AgentDiedError
from tpu_tgi_server.mailbox.replica import Replica
from tpu_tgi_server.mailbox.shares import share_out

DEFAULT_LOADER = "tpu_tgi_server.engine.loading:load_generator"

ResultT = TypeVar("ResultT")
Parts = Mapping[Part, tuple[Request, ...]]


class RootMailbox:
    """Owns the agents, and the order of the calls to them.

    `failed` is done with the reason when the server cannot go on: every agent has been given up.

    Raises:
        ValueError: the settings ask for more agents than there are chips.
    """

    def __init__(
        self, settings: Settings, on_progress: Callable[[Progress], None], loader: str = DEFAULT_LOADER
    ) -> None:
        shares = share_out(settings, os.environ)
        each = replace(settings, max_batch_size=-(-settings.max_batch_size // len(shares)))
        names = [f"agent {number}: " if len(shares) > 1 else "" for number in range(len(shares))]
        self._replicas = [
            Replica(each, share, loader, _prefixed(on_progress, name), partial(self._on_death, number))
            for number, (share, name) in enumerate(zip(shares, names, strict=True))
        ]
        self._placement = Placement([], 0)
        self._turn = asyncio.Lock()
        self._preparing = asyncio.Lock()  # one batch at a time, so that none pushes another's grammars out of the cache
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for replica in self._replicas:
            replica.failed.add_done_callback(self._on_failed)

    @property
    def is_alive(self) -> bool:
        """Whether an agent is there that takes commands."""
        return any(replica.is_alive for replica in self._replicas)

    async def start(self) -> ModelInfo:
        """Spawn the agents and wait until all have loaded the model. The slots are those of all together.

        Raises:
            AgentDiedError: one could not load, or got stuck; the message says why. It is not tried again.
        """
        infos = await asyncio.gather(*(replica.start() for replica in self._replicas))
        limits = infos[0].limits
        num_slots = [info.limits.num_slots for info in infos]
        self._placement = Placement(num_slots, limits.max_total_tokens)
        return replace(infos[0], limits=replace(limits, num_slots=sum(num_slots)))

    async def prefill(self, batch: Batch) -> StepResult:
        """See `Generator.prefill`. While the grammars of the batch compile, other commands have their turn."""
        if batch.is_liveness_probe:
            return await self._replicas[self._living()[0]].call(StepResult, Prefill(batch))
        if not batch.grammars:
            return await self._in_order(partial(self._prefill, batch))
        async with self._preparing:
            parts = self._placement.split(batch.requests, self._living())
            await asyncio.gather(*(self._prepare(part, requests) for part, requests in parts.items()))
            return await self._in_order(partial(self._prefill, batch, parts))

    async def decode(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """See `Generator.decode`. Fails with AgentDiedError only if nobody is left to go on with the batches."""
        return await self._in_order(partial(self._decode, batches))

    async def filter(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch | None:
        """See `Generator.filter`. A death is no error: one of FilterBatch ends the batching task of TGI's routers."""
        return await self._in_order(partial(self._filter, batch_id, request_ids))

    async def clear(self, batch_id: int | None) -> None:
        """See `Generator.clear`. A death is no error."""
        await self._in_order(partial(self._clear, batch_id))

    async def warm_up(self) -> None:
        """See `Generator.warm_up`. The deadline counts from one compiled graph to the next."""
        await self._in_order(self._warm_up)

    async def close(self) -> None:
        """End the agents, however busy they are. Calls in flight raise AgentDiedError."""
        await asyncio.gather(*(replica.close() for replica in self._replicas))

    async def _prepare(self, part: Part, requests: tuple[Request, ...]) -> None:
        await self._replicas[part.agent].prepare(Batch(part.id, requests).grammars)

    async def _prefill(self, batch: Batch, parts: Parts | None = None) -> StepResult:
        """All parts of a batch, or none. `parts` are given if they were made before, for the sake of grammars."""
        living = self._living()
        self._placement.check(batch)
        if parts is None or any(part.agent not in living for part in parts):
            parts = self._placement.split(batch.requests, living)
        self._placement.add(batch, parts)
        try:
            results, deaths = await self._prefill_parts(parts)
            if deaths:
                raise deaths[0]
        except Exception:
            await self._clear(batch.id)
            raise
        self._check_held(batch.id, deaths)
        return self._merged(batch.id, results)

    async def _decode(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """Step every agent that holds requests of the batches, then begin anew what the dead have left behind."""
        self._living()
        parts_of: dict[int, dict[Part, list[int]]] = {}
        for part, request_ids in self._placement.merge(batches).items():
            parts_of.setdefault(part.agent, {})[part] = request_ids
        batch_id = batches[0].id
        results, deaths = await _outcomes(self._step(agent, parts) for agent, parts in parts_of.items())
        self._check_held(batch_id, deaths)
        stepped = self._merged(batch_id, [result for result in results if result is not None])
        moved = self._merged(batch_id, await self._move_homeless(batch_id))
        slowest = max(stepped, moved, key=lambda result: result.total_ns)
        return replace(slowest, generations=stepped.generations + moved.generations, batch=moved.batch)

    async def _step(self, agent: int, parts: Mapping[Part, Sequence[int]]) -> StepResult | None:
        """One agent's share of a Decode: its parts become one, with the requests that are named. None if none is."""
        if not any(parts.values()):
            await asyncio.gather(*(self._keep(part, ()) for part in parts))
            return None
        replica = self._replicas[agent]
        named = tuple(CachedBatch(part.id, tuple(ids), max_tokens=0) for part, ids in parts.items())
        result = await replica.call(StepResult, Decode(named))
        replica.note_success()
        self._placement.join(list(parts))
        return result

    async def _move_homeless(self, batch_id: int) -> list[StepResult]:
        """Prefill the requests whose agents have died on living ones.

        They do not queue there for a slot while an agent is being loaded, which will have many.

        Raises:
            AgentDiedError: one of them has lost three agents in a row, and may be what they die of.
        """
        homeless = self._placement.homeless(batch_id)
        if not homeless:
            return []
        stuck = next((request for request in homeless if self._placement.is_stuck(request.id)), None)
        if stuck is not None:
            await self._clear(batch_id)
            raise AgentDiedError(f"request {stuck.id} has lost three agents in a row")
        is_any_loading = any(not replica.is_alive and not replica.failed.done() for replica in self._replicas)
        parts = self._placement.split(homeless, self._living(), may_wait=not is_any_loading)
        for part, requests in parts.items():
            logger.warning("{} requests of a dead agent begin anew on agent {}", len(requests), part.agent)
            self._placement.move(part, requests)
        results, deaths = await self._prefill_parts(parts)
        self._check_held(batch_id, deaths)
        return results

    async def _prefill_parts(self, parts: Parts) -> "tuple[list[StepResult], list[AgentDiedError]]":
        return await _outcomes(self._prefill_part(part, requests) for part, requests in parts.items())

    async def _prefill_part(self, part: Part, requests: tuple[Request, ...]) -> StepResult:
        replica = self._replicas[part.agent]
        result = await replica.call(StepResult, Prefill(Batch(part.id, requests)))
        if result.batch is None:
            replica.note_success()
        return result

    async def _filter(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch | None:
        parts = self._placement.keep(batch_id, request_ids)
        await _outcomes(self._keep(part, ids) for part, ids in parts.items())
        return self._placement.cached_batch(batch_id)

    async def _clear(self, batch_id: int | None) -> None:
        if batch_id is not None:
            await self._filter(batch_id, ())
            return
        self._placement.clear()
        living = (replica for replica in self._replicas if replica.is_alive)
        await _outcomes(replica.call(Done, Clear(None)) for replica in living)

    async def _keep(self, part: Part, request_ids: Sequence[int]) -> None:
        """Have an agent keep only these requests of a part."""
        replica = self._replicas[part.agent]
        if request_ids:
            await replica.call(Filtered, Filter(part.id, tuple(request_ids)))
        else:
            await replica.call(Done, Clear(part.id))

    async def _warm_up(self) -> None:
        self._living()
        _, deaths = await _outcomes(replica.warm_up() for replica in self._replicas)
        if deaths:
            raise deaths[0]

    async def _in_order(self, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Do some work after all that was asked for before, and to its end even if the caller goes away."""

        async def take_turn() -> ResultT:
            async with self._turn:
                return await work()

        running = asyncio.create_task(take_turn())
        running.add_done_callback(_forget_failure)
        return await asyncio.shield(running)

    def _living(self) -> list[int]:
        """The agents that take commands; at least one.

        Raises:
            AgentDiedError: there is none.
        """
        living = [number for number, replica in enumerate(self._replicas) if replica.is_alive]
        if not living:
            raise AgentDiedError("the model is being loaded again after a failure, try later")
        return living

    def _check_held(self, batch_id: int, deaths: Sequence[AgentDiedError]) -> None:
        """Raise the first death if the last agent died meanwhile, and the batch with it."""
        if batch_id not in self._placement:
            raise deaths[0] if deaths else AgentDiedError("the agent died")

    def _merged(self, batch_id: int, results: Sequence[StepResult]) -> StepResult:
        """The agents' answers as one: all that is new, and the times of the slowest."""
        generations = self._placement.take(batch_id, chain(*(result.generations for result in results)))
        slowest = max(results, key=lambda result: result.total_ns, default=StepResult((), None, 0, 0, 0))
        return replace(slowest, generations=tuple(generations), batch=self._placement.cached_batch(batch_id))

    def _on_death(self, agent: int) -> None:
        self._placement.evict(agent)
        if not self.is_alive:
            self._placement.clear()

    def _on_failed(self, failed: "asyncio.Future[str]") -> None:
        """An agent has been given up. The others go on without it; the last one ends the server."""
        if failed.cancelled():
            return
        if all(replica.failed.done() for replica in self._replicas):
            self.failed.set_result(failed.result())
        else:
            logger.error("{}; going on without this agent", failed.result())


async def _outcomes(calls: Iterable[Awaitable[ResultT]]) -> tuple[list[ResultT], list[AgentDiedError]]:
    """Wait for all calls; the results of those that succeeded, and the deaths of agents.

    Raises:
        Exception: the first failure that is no death, when all calls are over.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results, deaths = [], []
    for outcome in outcomes:
        if isinstance(outcome, AgentDiedError):
            deaths.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results.append(outcome)
    return results, deaths


def _prefixed(on_progress: Callable[[Progress], None], name: str) -> Callable[[Progress], None]:
    """Progress of one agent among several, under its name."""
    return lambda progress: on_progress(replace(progress, stage=name + progress.stage))


def _forget_failure(running: "asyncio.Future[ResultT]") -> None:
    """A failure that nobody waits for any more is none to report."""
    if not running.cancelled():
        running.exception()
