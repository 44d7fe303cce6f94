"""Continuous batching over slots: prefill, decode, filter, clear and warm-up, for any number of live batches.

Two invariants carry everything. A running request keeps its slot until it ends, whatever joins or leaves. And a
request that has no slot yet waits in arrival order, in its batch, without a Generation.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from itertools import islice

from tpu_tgi_server.engine.admission import Admission
from tpu_tgi_server.engine.batches import BatchTable
from tpu_tgi_server.engine.sequence import Sequence
from tpu_tgi_server.engine.slots import SlotTable
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    Generation,
    GrammarSource,
    Limits,
    StepResult,
)
from tpu_tgi_server.engine.validation import MAX_DETAILS_BYTES, details_bytes
from tpu_tgi_server.model.interface import Model, NextTokens, OnGraph, Prompt

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""How XLA's errors begin when memory runs out."""

TOO_LARGE_ADVICE = "lower --max-batch-size, --max-total-tokens or --max-input-tokens"


class Generator:
    """Owns the live requests: who runs in a slot and who waits for one.

    Every method either does all that it says or raises `EngineError` and changes nothing.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, limits: Limits, watermark_gamma: float = 0.5) -> None:
        self._model = model
        self._admission = Admission(tokenizer, limits, model.vocab_size)
        self._slots = SlotTable(limits.num_slots, model.vocab_size, watermark_gamma)
        self._max_total_tokens = limits.max_total_tokens
        self._batches = BatchTable()
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._forward_ns = 0
        self._details_bytes = 0

    def prepare(self, grammars: SequenceOf[GrammarSource], timeout_s: float) -> bool:
        """Compile the grammars of a batch to come, in the background; whether they are done. See `Admission`."""
        return self._admission.prepare(grammars, timeout_s)

    def prefill(self, batch: Batch) -> StepResult:
        """Admit a batch and generate the first token of every request that gets a slot.

        Raises:
            EngineError: INVALID; no request of the batch was admitted.
        """
        started = self._begin_call()
        if batch.id in self._batches:
            raise EngineError(ErrorKind.INVALID, f"batch {batch.id} is already live")
        sequences = self._admission.admit(batch, self._batches.all_request_ids())
        if batch.is_liveness_probe:
            return self._result(batch.id, [self._probe(sequences[0])], started)
        self._batches.add(batch.id, (request.id for request in batch.requests))
        self._sequences.update((sequence.request.id, sequence) for sequence in sequences)
        self._waiting.extend(sequences)
        return self._result(batch.id, self._start_waiting(batch.id), started)

    def decode(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """Merge the batches under the first one's id and generate one token for each of their running requests.

        Requests that a batch does not name are dropped; waiting ones start in the slots that came free.

        Raises:
            EngineError: UNKNOWN_BATCH or INVALID.
        """
        started = self._begin_call()
        self._drop(self._batches.merge(batches))
        concat_ns = time.perf_counter_ns() - started
        batch_id = batches[0].id
        members = (self._sequences[id] for id in self._batches.request_ids(batch_id))
        generations = self._step([sequence for sequence in members if sequence.slot is not None])
        generations += self._start_waiting(batch_id)
        return self._result(batch_id, generations, started, concat_ns)

    def filter(self, batch_id: int, request_ids: Collection[int]) -> CachedBatch | None:
        """Keep only the named requests of one batch. Ids that it does not have are ignored; None if none is left."""
        self._drop(self._batches.keep(batch_id, request_ids))
        return self._cached_batch(batch_id)

    def clear(self, batch_id: int | None) -> None:
        """Drop one batch, if it is known, or everything."""
        if batch_id is None:
            self._drop(self._batches.all_request_ids())
            self._batches.clear()
        else:
            self._drop(self._batches.request_ids(batch_id))
            self._batches.remove(batch_id)

    def warm_up(self, on_graph: OnGraph) -> None:
        """Run every graph once.

        Raises:
            EngineError: BUSY; a request is live, and warm-up would overwrite its cache. TOO_LARGE; the device's
                memory does not hold what the settings ask for.
        """
        if self._sequences:
            raise EngineError(ErrorKind.BUSY, "warm-up needs an idle server: clear the cache first")
        try:
            self._model.warm_up(on_graph)
        except RuntimeError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            raise EngineError(
                ErrorKind.TOO_LARGE, f"the warm-up does not fit the device's memory: {TOO_LARGE_ADVICE}"
            ) from error

    def _probe(self, sequence: Sequence) -> Generation:
        """Answer a liveness probe with one token of the model, in the scratch cell of whatever slot is there."""
        sequence.max_new_tokens = 1
        prompt = Prompt(0, sequence.prompt_ids, is_kept=False, slot_len=int(self._slots.slot_lens[0]))
        with self._forward_clock():
            chosen = self._model.prefill([prompt], None)
        return sequence.append(chosen, prompt.slot)

    def _start_waiting(self, batch_id: int) -> list[Generation]:
        """Give free slots to waiting requests in arrival order, and prefill those of the named batch.

        A slot that is due to an earlier request of another batch is left for it: only requests of the batch in hand
        may appear in its answer. Requests that end with their first token make room for the next.
        """
        members = set(self._batches.request_ids(batch_id))
        generations: list[Generation] = []
        while True:
            first = islice(self._waiting, self._slots.num_free)
            starting = [sequence for sequence in first if sequence.request.id in members]
            starting = self._within_one_response(starting)
            if not starting:
                return generations
            for group in self._prefill_groups(starting):
                generations += self._prefill(group)

    def _within_one_response(self, starting: list[Sequence]) -> list[Sequence]:
        """As many, in order, as one response has room for with the details of their prompts. The others wait on."""
        for number, sequence in enumerate(starting):
            if sequence.request.prefill_logprobs:
                self._details_bytes += details_bytes(sequence.request, len(sequence.prompt_ids))
                if self._details_bytes > MAX_DETAILS_BYTES:
                    return starting[:number]
        return starting

    def _prefill_groups(self, sequences: Iterable[Sequence]) -> list[list[Sequence]]:
        """Split into runs that fit one prefill each."""
        groups: list[list[Sequence]] = []
        num_tokens = 0
        for sequence in sequences:
            num_tokens += len(sequence.prompt_ids)
            if not groups or num_tokens > self._model.max_prefill_tokens:
                groups.append([])
                num_tokens = len(sequence.prompt_ids)
            groups[-1].append(sequence)
        return groups

    def _prefill(self, sequences: list[Sequence]) -> list[Generation]:
        for sequence in sequences:
            self._waiting.remove(sequence)
        prompts = [Prompt(self._slots.assign(sequence), sequence.prompt_ids) for sequence in sequences]
        sampler = self._slots.sampler_inputs(sequences)
        with self._forward_clock():
            chosen = self._model.prefill(prompts, sampler)
        return [self._take(sequence, chosen) for sequence in sequences]

    def _step(self, sequences: list[Sequence]) -> list[Generation]:
        if not sequences:
            return []
        slots = self._slots
        max_slot_len = max(sequence.slot_len for sequence in sequences)
        sampler = slots.sampler_inputs(sequences)
        with self._forward_clock():
            chosen = self._model.decode(slots.token_ids, slots.slot_lens, max_slot_len, sampler)
        return [self._take(sequence, chosen) for sequence in sequences]

    def _take(self, sequence: Sequence, chosen: NextTokens) -> Generation:
        """Append the chosen token to its sequence, and release the sequence if it ends."""
        assert sequence.slot is not None
        generation = sequence.append(chosen, sequence.slot)
        self._slots.advance(sequence)
        if generation.generated_text is not None:
            self._release(sequence)
        return generation

    def _drop(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._release(self._sequences[request_id])

    def _release(self, sequence: Sequence) -> None:
        """Forget a request, wherever it was."""
        del self._sequences[sequence.request.id]
        if sequence.slot is not None:
            self._slots.release(sequence)
        else:
            self._waiting.remove(sequence)

    def _result(self, batch_id: int, generations: list[Generation], started: int, concat_ns: int = 0) -> StepResult:
        self._batches.keep(batch_id, self._sequences.keys())
        return StepResult(
            generations=tuple(generations),
            batch=self._cached_batch(batch_id),
            concat_ns=concat_ns,
            forward_ns=self._forward_ns,
            total_ns=time.perf_counter_ns() - started,
        )

    def _cached_batch(self, batch_id: int) -> CachedBatch | None:
        ids = self._batches.request_ids(batch_id)
        return CachedBatch(batch_id, ids, max_tokens=len(ids) * self._max_total_tokens) if ids else None

    def _begin_call(self) -> int:
        """Set back what is counted within one call; the time."""
        self._forward_ns = 0
        self._details_bytes = 0
        return time.perf_counter_ns()

    @contextmanager
    def _forward_clock(self) -> Iterator[None]:
        started = time.perf_counter_ns()
        yield
        self._forward_ns += time.perf_counter_ns() - started
