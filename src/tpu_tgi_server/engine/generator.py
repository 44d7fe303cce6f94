"""Continuous batching over slots: prefill, decode, filter, clear and warm-up, for any number of live batches.

Two invariants carry everything. A running request keeps its slot until it ends, whatever joins or leaves. And a
request that has no slot yet waits in arrival order, in its batch, without a Generation.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice

import numpy as np

from tpu_tgi_server.engine.batches import BatchTable
from tpu_tgi_server.engine.sequence import Sequence
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import (
    LIVENESS_ID,
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    Generation,
    Limits,
    Request,
    StepResult,
)
from tpu_tgi_server.engine.validation import check_batch, check_prompt, check_request
from tpu_tgi_server.model.interface import Model, NextTokens, OnGraph, Prompt


class Generator:
    """Owns the slots: which request holds which, and who waits for one.

    Every method either does all that it says or raises `EngineError` and changes nothing.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, limits: Limits) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._batches = BatchTable()
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._free_slots = list(range(limits.num_slots))
        self._token_ids = np.zeros(limits.num_slots, np.int32)
        self._slot_lens = np.zeros(limits.num_slots, np.int32)
        self._forward_ns = 0

    def prefill(self, batch: Batch) -> StepResult:
        """Admit a batch and generate the first token of every request that gets a slot.

        Raises:
            EngineError: INVALID; no request of the batch was admitted.
        """
        started = self._start_clock()
        check_batch(batch, self._batches.all_request_ids())
        if batch.id in self._batches:
            raise EngineError(ErrorKind.INVALID, f"batch {batch.id} is already live")
        sequences = [self._admit(request) for request in batch.requests]
        if [request.id for request in batch.requests] == [LIVENESS_ID]:
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
        started = self._start_clock()
        self._drop(self._batches.merge(batches))
        batch_id = batches[0].id
        running = [sequence for sequence in self._members(batch_id) if sequence.slot is not None]
        generations = self._step(running) if running else []
        generations += self._start_waiting(batch_id)
        return self._result(batch_id, generations, started)

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
            EngineError: BUSY; a request is live, and warm-up would overwrite its cache.
        """
        if self._sequences:
            raise EngineError(ErrorKind.BUSY, "warm-up needs an idle server: clear the cache first")
        self._model.warm_up(on_graph)

    def _admit(self, request: Request) -> Sequence:
        check_request(request)
        ids = self._tokenizer.encode(request.inputs, request.truncate, request.add_special_tokens)
        check_prompt(request, len(ids), self._limits)
        return Sequence(request, ids, self._tokenizer, self._limits.max_total_tokens)

    def _probe(self, sequence: Sequence) -> Generation:
        """Answer a liveness probe through the model, in the scratch cell of whatever slot is there."""
        prompt = Prompt(0, sequence.prompt_ids, is_kept=False, slot_len=int(self._slot_lens[0]))
        (generation,) = self._take([sequence], self._timed_prefill([prompt]), [0])
        return generation

    def _start_waiting(self, batch_id: int) -> list[Generation]:
        """Give free slots to waiting requests in arrival order, and prefill those of the named batch.

        A slot that is due to an earlier request of another batch is left for it: only requests of the batch in hand
        may appear in its answer. Requests that end with their first token make room for the next.
        """
        members = set(self._batches.request_ids(batch_id))
        generations: list[Generation] = []
        while True:
            first = islice(self._waiting, len(self._free_slots))
            starting = [sequence for sequence in first if sequence.request.id in members]
            if not starting:
                return generations
            for group in self._prefill_groups(starting):
                generations += self._prefill(group)

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
        prompts = []
        for sequence in sequences:
            self._waiting.remove(sequence)
            sequence.slot = self._free_slots.pop(0)
            prompts.append(Prompt(sequence.slot, sequence.prompt_ids))
        return self._take(sequences, self._timed_prefill(prompts), range(len(prompts)))

    def _step(self, sequences: list[Sequence]) -> list[Generation]:
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        started = time.perf_counter_ns()
        chosen = self._model.decode(self._token_ids, self._slot_lens, int(self._slot_lens[slots].max()))
        self._forward_ns += time.perf_counter_ns() - started
        return self._take(sequences, chosen, slots)

    def _timed_prefill(self, prompts: list[Prompt]) -> NextTokens:
        started = time.perf_counter_ns()
        chosen = self._model.prefill(prompts)
        self._forward_ns += time.perf_counter_ns() - started
        return chosen

    def _take(self, sequences: list[Sequence], chosen: NextTokens, rows: Iterable[int]) -> list[Generation]:
        """Append the chosen tokens to their sequences and release those that end."""
        generations = []
        for sequence, row in zip(sequences, rows, strict=True):
            generation = sequence.append(int(chosen.ids[row]), float(chosen.logprobs[row]))
            generations.append(generation)
            if sequence.slot is not None:
                self._token_ids[sequence.slot] = sequence.output_ids[-1]
                self._slot_lens[sequence.slot] = sequence.slot_len
            if generation.generated_text is not None:
                self._release(sequence)
        return generations

    def _members(self, batch_id: int) -> list[Sequence]:
        return [self._sequences[id] for id in self._batches.request_ids(batch_id)]

    def _drop(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._release(self._sequences[request_id])

    def _release(self, sequence: Sequence) -> None:
        """Forget a request and free its slot. Nothing on the device changes: the slot's cells become scratch."""
        self._sequences.pop(sequence.request.id, None)
        if sequence.slot is not None:
            self._slot_lens[sequence.slot] = 0
            self._free_slots.append(sequence.slot)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def _result(self, batch_id: int, generations: list[Generation], started: int) -> StepResult:
        self._batches.keep(batch_id, self._sequences.keys())
        return StepResult(
            generations=tuple(generations),
            batch=self._cached_batch(batch_id),
            forward_ns=self._forward_ns,
            total_ns=time.perf_counter_ns() - started,
        )

    def _cached_batch(self, batch_id: int) -> CachedBatch | None:
        ids = self._batches.request_ids(batch_id)
        if not ids:
            return None
        return CachedBatch(batch_id, ids, max_tokens=len(ids) * self._limits.max_total_tokens)

    def _start_clock(self) -> int:
        self._forward_ns = 0
        return time.perf_counter_ns()
