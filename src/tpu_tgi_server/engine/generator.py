"""Continuous batching over slots: prefill, decode, filter, clear and warm-up, for any number of live batches.

Two invariants carry everything. A running request keeps its slot until it ends, whatever joins or leaves. And a
request that has no slot yet waits in arrival order, in its batch, without a Generation.
"""

import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from tpu_tgi_server.engine.admission import Admission
from tpu_tgi_server.engine.batches import BatchTable
from tpu_tgi_server.engine.call_clock import CallClock
from tpu_tgi_server.engine.prefill_queue import Part, PrefillQueue
from tpu_tgi_server.engine.sequence import Sequence
from tpu_tgi_server.engine.slots import SlotTable
from tpu_tgi_server.engine.steps_in_flight import StepsInFlight
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    Generation,
    GrammarSource,
    Limits,
    Pace,
    StepResult,
)
from tpu_tgi_server.model.interface import Model, NextTokens, OnGraph, PromptChunk
from tpu_tgi_server.profiling import span

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""How XLA's errors begin when memory runs out."""

TOO_LARGE_ADVICE = "lower --max-batch-size, --max-total-tokens or --max-input-tokens"


class Generator:
    """Owns the live requests: who runs in a slot and who waits for one.

    Every method either does all that it says or raises `EngineError` and changes nothing.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        limits: Limits,
        watermark_gamma: float = 0.5,
        pace: Pace = Pace(),  # noqa: B008 - it is frozen
    ) -> None:
        self._model = model
        self._admission = Admission(tokenizer, limits, model.vocab_size)
        self._slots = SlotTable(limits, model.vocab_size, watermark_gamma)
        self._max_total_tokens = limits.max_total_tokens
        self._pace = pace
        self._prefill_room = pace.prefill_tokens
        self._batches = BatchTable()
        self._sequences: dict[int, Sequence] = {}
        self._queue = PrefillQueue(model.max_prefill_tokens)
        self._in_flight: list[StepsInFlight] = []
        self._last_batch_id: int | None = None
        self._clock = CallClock()

    def prepare(self, grammars: SequenceOf[GrammarSource], timeout_s: float) -> bool:
        """Compile the grammars of a batch to come, in the background; whether they are done. See `Admission`."""
        return self._admission.prepare(grammars, timeout_s)

    def prefill(self, batch: Batch) -> StepResult:
        """Admit a batch and generate the first token of every request that gets a slot.

        Raises:
            EngineError: INVALID; no request of the batch was admitted.
        """
        self._clock = CallClock()
        if batch.id in self._batches:
            raise EngineError(ErrorKind.INVALID, f"batch {batch.id} is already live")
        with span("admit"):
            sequences = self._admission.admit(batch, self._batches.all_request_ids())
        if batch.is_liveness_probe:
            return self._result(batch.id, [self._probe(sequences[0])])
        if not any(sequence.is_prefilled for sequence in self._sequences.values()):
            self._prefill_room = self._pace.prefill_tokens
        self._batches.add(batch.id, (request.id for request in batch.requests))
        self._sequences.update((sequence.request.id, sequence) for sequence in sequences)
        self._queue.add(sequences)
        return self._result(batch.id, self._prefill_some(batch.id))

    def decode(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """Merge the batches under the first one's id and generate tokens for their running requests.

        Requests that a batch does not name are dropped; waiting ones start in the slots that came free.

        Raises:
            EngineError: UNKNOWN_BATCH or INVALID.
        """
        self._clock = CallClock()
        self._drop(self._batches.merge(batches))
        self._clock.end_concat()
        batch_id = batches[0].id
        running = self._running(batch_id)
        generations = self._take_tokens(running)
        if not generations:
            self._prefill_room = self._pace.prefill_tokens
        generations += self._prefill_some(batch_id)
        self._prefill_room = self._pace.prefill_tokens
        return self._result(batch_id, generations)

    def step_ahead(self) -> None:
        """Start the next steps of the batch that was answered last, before the router asks for them.

        Whatever comes in between: the tokens wait for the next Decode of their request, or are forgotten with it.
        """
        if self._last_batch_id is None or not all(steps.is_taken for steps in self._in_flight):
            return  # a batch that was prefilled meanwhile joins the one whose tokens wait, and then they step together
        started = time.perf_counter_ns()
        for steps in self._start_steps(self._running(self._last_batch_id)):
            steps.ahead_ns = time.perf_counter_ns() - started

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
        prompt_ids = sequence.prompt_ids[-self._model.max_prefill_tokens :]  # one row, as what it says does not matter
        chunk = PromptChunk(0, prompt_ids, is_kept=False, scratch_position=int(self._slots.slot_lens[0]))
        with self._clock.forward():
            chosen = self._model.prefill([chunk], None)
        return sequence.append([chosen], chunk.slot)

    def _prefill_some(self, batch_id: int) -> list[Generation]:
        """Prefill what is next of a batch's prompts, as much as may be done between two tokens of running streams."""
        generations: list[Generation] = []
        request_ids = self._batches.request_ids(batch_id)
        while row := self._queue.next_row(request_ids, self._slots.num_free, self._prefill_room):
            self._prefill_room -= sum(part.num_tokens for part in row)
            generations += self._prefill_row(row)
        return generations

    def _prefill_row(self, row: SequenceOf[Part]) -> list[Generation]:
        """Prefill parts of prompts together. Prompts that are whole then bring their first token."""
        chunks = [self._chunk(part) for part in row]
        sequences = [part.sequence for part in row]
        sampler = self._slots.sampler_inputs(sequences)
        with self._clock.forward(), span("prefill"):
            chosen = self._model.prefill(chunks, sampler)
        self._queue.done(row)
        return [generation for sequence in sequences if (generation := self._end_part(sequence, chosen)) is not None]

    def _chunk(self, part: Part) -> PromptChunk:
        """The next part of a prompt, in its slot, which it gets with the first."""
        sequence = part.sequence
        slot = self._slots.assign(sequence) if sequence.slot is None else sequence.slot
        start, end = sequence.num_prefilled, sequence.num_prefilled + part.num_tokens
        next_id = sequence.prompt_ids[end] if end < len(sequence.prompt_ids) else 0
        return PromptChunk(slot, sequence.prompt_ids[start:end], start, next_id)

    def _end_part(self, sequence: Sequence, chosen: NextTokens) -> Generation | None:
        sequence.take_prompt_logprobs(chosen)
        if sequence.is_prefilled:
            return self._append(sequence, [chosen])
        self._slots.advance(sequence)
        return None

    def _running(self, batch_id: int) -> list[Sequence]:
        """The requests of a batch to which tokens come."""
        members = (self._sequences[id] for id in self._batches.request_ids(batch_id))
        return [sequence for sequence in members if sequence.is_prefilled]

    def _take_tokens(self, running: SequenceOf[Sequence]) -> list[Generation]:
        """Tokens for these sequences: of the steps that are in flight for them, else of new ones.

        A sequence that joined after steps were started gets its tokens with the next ones.
        """
        request_ids = [sequence.request.id for sequence in running]
        claimed = [steps for steps in self._in_flight if steps.has_any(request_ids)]
        generations = []
        with self._clock.forward():
            claimed = claimed or self._start_steps(running)
            with span("wait for tokens"):
                results = [steps.tokens() for steps in claimed]
        for steps, chosen in zip(claimed, results, strict=True):
            self._clock.add_ahead(steps.ahead_ns)
            steps.ahead_ns = 0
            with span("text"):
                generations += [
                    self._append(sequence, chosen) for sequence in running if steps.take(sequence.request.id)
                ]
        self._in_flight = [steps for steps in self._in_flight if not steps.is_taken]
        return generations

    def _start_steps(self, sequences: SequenceOf[Sequence]) -> list[StepsInFlight]:
        """Start as many steps as go without the host: at most `decode_steps`, and no more than somebody needs."""
        if not sequences:
            return []
        num_steps = min(self._pace.decode_steps, max(sequence.num_left for sequence in sequences))
        if any(sequence.request.needs_host for sequence in sequences):
            num_steps = 1
        slots = self._slots
        with span("start steps"):
            read = self._model.decode(
                slots.token_ids,
                slots.slot_lens,
                slots.num_used(sequences),
                max(sequence.slot_len for sequence in sequences),
                [slots.sampler_inputs(sequences, step) for step in range(num_steps)],
            )
        slots.begin_steps(sequences, num_steps)
        steps = StepsInFlight(sequences, read)
        self._in_flight.append(steps)
        return [steps]

    def _append(self, sequence: Sequence, chosen: SequenceOf[NextTokens]) -> Generation:
        """Append the chosen tokens to their sequence, and release the sequence if it ends."""
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
        self._queue.remove(sequence)
        for steps in self._in_flight:
            steps.forget(sequence.request.id)
        if sequence.slot is not None:
            self._slots.release(sequence)

    def _result(self, batch_id: int, generations: list[Generation]) -> StepResult:
        self._batches.keep(batch_id, self._sequences.keys())
        self._last_batch_id = batch_id
        return StepResult(
            generations=tuple(generations),
            batch=self._cached_batch(batch_id),
            concat_ns=self._clock.concat_ns,
            forward_ns=self._clock.forward_ns,
            total_ns=self._clock.total_ns(),
        )

    def _cached_batch(self, batch_id: int) -> CachedBatch | None:
        ids = self._batches.request_ids(batch_id)
        return CachedBatch(batch_id, ids, max_tokens=len(ids) * self._max_total_tokens) if ids else None
