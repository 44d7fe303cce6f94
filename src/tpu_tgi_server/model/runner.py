"""One model on one device, from host arrays to chosen tokens: which graph runs, and what travels to it and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.interface import (
    MAX_TOP_TOKENS,
    Graph,
    NextTokens,
    OnGraph,
    PromptChunk,
    ReadTokens,
    SamplerInputs,
)
from tpu_tgi_server.model.packing import neutral_masks, pack_chunks, pack_masks, pack_sampler, unpack_result
from tpu_tgi_server.model.sampling import ALL_STAGES, Stages
from tpu_tgi_server.model.steps import DeviceSteps
from tpu_tgi_server.runtime.interface import Runtime


@dataclass(frozen=True)
class RunnerLimits:
    """For which sizes there are graphs.

    Attributes:
        max_row_tokens: prompt tokens of one prefill, which is also the size of a chunk.
        max_input_tokens: of one prompt.
        max_total_tokens: S, the length of a slot.
    """

    max_row_tokens: int
    max_input_tokens: int
    max_total_tokens: int


class ModelRunner:
    """Owns the list of graphs and the neutral masks on the device. See `model.interface.Model` for the contract."""

    def __init__(self, runtime: Runtime, steps: DeviceSteps, limits: RunnerLimits) -> None:
        self._runtime = runtime
        self._num_slots = steps.num_slots
        self._steps = steps
        self._num_top = min(MAX_TOP_TOKENS, steps.vocab_size)
        self._max_total_tokens = limits.max_total_tokens
        sizes = (limits.max_row_tokens, limits.max_input_tokens, limits.max_total_tokens)
        self._graphs = buckets.graphs(*sizes)
        self._prefill_buckets = buckets.prefill_buckets(limits.max_row_tokens)
        self._chunk_buckets = buckets.chunk_buckets(self._prefill_buckets[-1], *sizes[1:])
        self._decode_buckets = buckets.decode_buckets(limits.max_total_tokens)
        self._no_state = self._to_device(np.zeros((2, steps.num_slots), np.int32))
        self._neutral_masks = self._to_device(neutral_masks(steps.num_slots, steps.vocab_size))
        with_history = [*steps.cache_tensors, *steps.history_tensors]
        self._prefill = runtime.prepare(steps.prefill, steps.cache_tensors)
        self._prefill_sampled = runtime.prepare(steps.prefill_sampled, with_history)
        self._decode = runtime.prepare(steps.decode, steps.cache_tensors)
        self._decode_sampled = runtime.prepare(steps.decode_sampled, with_history)

    @property
    def vocab_size(self) -> int:
        return self._steps.vocab_size

    @property
    def max_prefill_tokens(self) -> int:
        return self._prefill_buckets[-1]

    def prefill(self, chunks: Sequence[PromptChunk], sampler: SamplerInputs | None) -> NextTokens:
        chunk_lens = {chunk.slot: len(chunk.token_ids) for chunk in chunks}
        num_tokens, context_len = self._prefill_shape(chunks, sum(chunk_lens.values()))
        packed = self._to_device(pack_chunks(chunks, num_tokens, self._num_slots))
        if sampler is None:
            return self._read(self._prefill(packed, context_len), self._num_slots, None, {})
        fields, masks, stages = self._sampler_arguments(sampler, self._num_slots)
        result = self._prefill_sampled(packed, context_len, fields, masks, stages)
        return self._read(result, self._num_slots, stages, chunk_lens)

    def decode(
        self,
        token_ids: NDArray[np.int32],
        slot_lens: NDArray[np.int32],
        num_used_slots: int,
        max_slot_len: int,
        samplers: Sequence[SamplerInputs | None],
    ) -> ReadTokens:
        num_slots = self._num_slots if self._runtime.is_compiled else num_used_slots
        host_state = np.stack([token_ids, slot_lens])[:, :num_slots]
        state: Tensor | None = None
        results: list[tuple[Tensor, Stages | None]] = []
        for context_len, sampler in enumerate(samplers, start=max_slot_len + 1):
            padded_len = self._padded(min(context_len, self._max_total_tokens), self._decode_buckets)
            stages = None
            if sampler is None:
                result, state = self._decode(self._to_device(host_state) if state is None else state, padded_len)
            else:
                known_state = self._of_first(num_slots, self._no_state) if state is None else state
                of_host = host_state if state is None else None
                fields, masks, stages = self._sampler_arguments(sampler, num_slots, of_host)
                result, state = self._decode_sampled(known_state, padded_len, fields, masks, stages)
            results.append((result, stages))
        return lambda: [self._read(result, num_slots, stages, {}) for result, stages in results]

    def warm_up(self, on_graph: OnGraph) -> None:
        for number, graph in enumerate(self._graphs, start=1):
            self.run_once(graph)
            on_graph(graph, number, len(self._graphs))

    def run_once(self, graph: Graph) -> None:
        """Run one graph of the list on nothing that matters."""
        sampler = neutral_sampler(self._num_slots) if graph.has_sampler else None
        if graph.kind == "decode":
            zeros = np.zeros(self._num_slots, np.int32)
            self.decode(zeros, zeros, self._num_slots, graph.size - 1, [sampler])()
            return
        num_tokens = graph.size if graph.kind == "prefill" else self.max_prefill_tokens
        start = graph.size - num_tokens  # so that the chunk ends where its window does
        self.prefill([PromptChunk(slot=0, token_ids=[0] * num_tokens, start=start, is_kept=False)], sampler)

    def _prefill_shape(self, chunks: Sequence[PromptChunk], num_tokens: int) -> tuple[int, int | None]:
        """How many tokens the row has, and how many positions of the cache it reads."""
        if chunks[0].start == 0:
            return self._padded(num_tokens, self._prefill_buckets), None
        (chunk,) = chunks
        row_len = self.max_prefill_tokens if self._runtime.is_compiled else num_tokens
        return row_len, self._padded(chunk.end, self._chunk_buckets)

    def _padded(self, size: int, sizes: Sequence[int]) -> int:
        """The bucket that holds `size`. Where nothing is compiled, the true size is as good and cheaper."""
        bucket = buckets.smallest_bucket(sizes, size)
        return bucket if self._runtime.is_compiled else size

    def _sampler_arguments(
        self, sampler: SamplerInputs, num_slots: int, host_state: NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor, Stages]:
        stages = ALL_STAGES if self._runtime.is_compiled else needed_stages(sampler)
        masks = pack_masks(sampler, self._num_slots, self._steps.vocab_size)
        masks_on_device = self._neutral_masks if masks is None else self._to_device(masks)
        fields = self._to_device(pack_sampler(sampler, num_slots, host_state))
        return fields, self._of_first(num_slots, masks_on_device), stages

    def _of_first(self, num_slots: int, tensor: Tensor) -> Tensor:
        """What a tensor [2, B, ...] says of the first slots. All of it is itself: torch_xla would trace an alias."""
        return tensor if num_slots == self._num_slots else tensor[:, :num_slots]

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return self._runtime.to_device(torch.from_numpy(array))

    def _read(self, result: Tensor, num_slots: int, stages: Stages | None, chunk_lens: Mapping[int, int]) -> NextTokens:
        """Wait for a result of these stages, None for a greedy one."""
        num_top = self._num_top if stages is not None and stages.top_tokens else 0
        has_logprobs = stages is not None and stages.prompt_logprobs
        vector = self._runtime.to_host(result).numpy()
        return unpack_result(vector, num_slots, num_top, chunk_lens if has_logprobs else {})


def needed_stages(sampler: SamplerInputs) -> Stages:
    """The stages that some slot asks for."""
    is_sampled = sampler.is_sampled.any()
    return Stages(
        watermark=sampler.favoured is not None,
        penalties=bool((sampler.repetition_penalty != 1).any() or (sampler.frequency_penalty != 0).any()),
        grammar=sampler.allowed is not None,
        top_k=bool(is_sampled and (sampler.top_k != 0).any()),
        top_p=bool(is_sampled and (sampler.top_p < 1).any()),
        typical_p=bool(is_sampled and (sampler.typical_p < 1).any()),
        sampling=bool(is_sampled),
        top_tokens=sampler.wants_top_tokens,
        prompt_logprobs=sampler.wants_prompt_logprobs,
    )


def neutral_sampler(num_slots: int) -> SamplerInputs:
    """A sampler that takes the best token of every slot."""
    zeros, ones = np.zeros(num_slots, np.float32), np.ones(num_slots, np.float32)
    off = np.zeros(num_slots, np.int32)
    return SamplerInputs(
        top_k=off,
        is_sampled=off,
        is_stepped=off,
        temperature=ones,
        top_p=ones,
        typical_p=ones,
        repetition_penalty=ones,
        frequency_penalty=zeros,
        uniform=zeros,
    )
