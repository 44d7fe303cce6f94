"""One model on one device, from host arrays to chosen tokens: which graph runs, and what travels to it and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.interface import MAX_TOP_TOKENS, NextTokens, OnGraph, Prompt, SamplerInputs
from tpu_tgi_server.model.packing import neutral_masks, pack_masks, pack_prompts, pack_sampler, unpack_result
from tpu_tgi_server.model.sampling import ALL_STAGES, Stages
from tpu_tgi_server.model.steps import DeviceSteps
from tpu_tgi_server.runtime.interface import Runtime


class ModelRunner:
    """Owns the list of graphs and the neutral masks on the device. See `model.interface.Model` for the contract."""

    def __init__(self, runtime: Runtime, steps: DeviceSteps, max_input_tokens: int, max_total_tokens: int) -> None:
        self._runtime = runtime
        self._steps = steps
        self._graphs = buckets.graphs(max_input_tokens, max_total_tokens)
        self._prefill_buckets = buckets.prefill_buckets(max_input_tokens)
        self._decode_buckets = buckets.decode_buckets(max_total_tokens)
        self._num_slots = steps.num_slots
        self._num_top = min(MAX_TOP_TOKENS, steps.vocab_size)
        self._neutral_masks = self._to_device(neutral_masks(steps.num_slots, steps.vocab_size))

    @property
    def vocab_size(self) -> int:
        return self._steps.vocab_size

    @property
    def max_prefill_tokens(self) -> int:
        return self._prefill_buckets[-1]

    def prefill(self, prompts: Sequence[Prompt], sampler: SamplerInputs | None) -> NextTokens:
        prompt_lens = {prompt.slot: len(prompt.token_ids) for prompt in prompts}
        bucket = self._padded(sum(prompt_lens.values()), self._prefill_buckets)
        packed = self._to_device(pack_prompts(prompts, bucket, self._num_slots))
        if sampler is None:
            return unpack_result(self._run(self._steps.prefill, packed), self._num_slots, 0, {})
        fields, masks, stages = self._sampler_arguments(sampler)
        result = self._run(self._steps.prefill_sampled, packed, fields, masks, stages)
        return self._unpack(result, stages, prompt_lens)

    def decode(
        self,
        token_ids: NDArray[np.int32],
        slot_lens: NDArray[np.int32],
        max_slot_len: int,
        sampler: SamplerInputs | None,
    ) -> NextTokens:
        context_len = self._padded(max_slot_len + 1, self._decode_buckets)
        packed = self._to_device(np.stack([token_ids, slot_lens]))
        if sampler is None:
            return unpack_result(self._run(self._steps.decode, packed, context_len), self._num_slots, 0, {})
        fields, masks, stages = self._sampler_arguments(sampler)
        result = self._run(self._steps.decode_sampled, packed, context_len, fields, masks, stages)
        return self._unpack(result, stages, {})

    def warm_up(self, on_graph: OnGraph) -> None:
        zeros = np.zeros(self._num_slots, np.int32)
        for number, graph in enumerate(self._graphs, start=1):
            sampler = neutral_sampler(self._num_slots) if graph.has_sampler else None
            if graph.kind == "prefill":
                self.prefill([Prompt(slot=0, token_ids=[0] * graph.size, is_kept=False)], sampler)
            else:
                self.decode(zeros, zeros, graph.size - 1, sampler)
            on_graph(graph, number, len(self._graphs))

    def _padded(self, size: int, sizes: Sequence[int]) -> int:
        """The bucket that holds `size`. Where nothing is compiled, the true size is as good and cheaper."""
        bucket = buckets.smallest_bucket(sizes, size)
        return bucket if self._runtime.is_compiled else size

    def _run(self, step: Callable[..., Tensor], *arguments: object) -> NDArray[np.float32]:
        result: NDArray[np.float32] = self._runtime.run(step, *arguments).numpy()
        return result

    def _sampler_arguments(self, sampler: SamplerInputs) -> tuple[Tensor, Tensor, Stages]:
        stages = ALL_STAGES if self._runtime.is_compiled else needed_stages(sampler)
        masks = pack_masks(sampler, self._num_slots, self.vocab_size)
        masks_on_device = self._neutral_masks if masks is None else self._to_device(masks)
        return self._to_device(pack_sampler(sampler)), masks_on_device, stages

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return self._runtime.to_device(torch.from_numpy(array))

    def _unpack(self, result: NDArray[np.float32], stages: Stages, prompt_lens: Mapping[int, int]) -> NextTokens:
        num_top = self._num_top if stages.top_tokens else 0
        return unpack_result(result, self._num_slots, num_top, prompt_lens if stages.prompt_logprobs else {})


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
