"""The compiled steps of one model on one device: prefill and decode, from host arrays to chosen tokens.

Everything that varies travels in one small int32 transfer a step, as data and never as a Python number, so a graph
depends on its bucket alone.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.attention import DecodeStep, PrefillStep
from tpu_tgi_server.model.cache import StaticCacheXla
from tpu_tgi_server.model.interface import NextTokens, OnGraph, Prompt
from tpu_tgi_server.model.sampling import choose_greedily
from tpu_tgi_server.runtime.interface import Runtime


class ModelRunner:
    """Owns the weights and the cache on the device. See `model.interface.Model` for the contract."""

    def __init__(
        self,
        runtime: Runtime,
        model: PreTrainedModel,
        cache: StaticCacheXla,
        max_input_tokens: int,
        max_total_tokens: int,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._cache = cache
        self._graphs = buckets.graphs(max_input_tokens, max_total_tokens)
        self._prefill_buckets = buckets.prefill_buckets(max_input_tokens)
        self._decode_buckets = buckets.decode_buckets(max_total_tokens)
        self.num_slots: int = cache.keys[0].shape[0]
        self._slots = runtime.to_device(torch.arange(self.num_slots, dtype=torch.int32))

    @property
    def max_prefill_tokens(self) -> int:
        return self._prefill_buckets[-1]

    def prefill(self, prompts: Sequence[Prompt]) -> NextTokens:
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        packed = pack_prompts(prompts, buckets.smallest_bucket(self._prefill_buckets, num_tokens), self.num_slots)
        return self._run(self._prefill, packed, len(prompts))

    def decode(self, token_ids: NDArray[np.int32], slot_lens: NDArray[np.int32], max_slot_len: int) -> NextTokens:
        context_len = buckets.smallest_bucket(self._decode_buckets, max_slot_len + 1)
        return self._run(self._decode, np.concatenate([token_ids, slot_lens]), self.num_slots, context_len)

    def warm_up(self, on_graph: OnGraph) -> None:
        zeros = np.zeros(self.num_slots, np.int32)
        for number, graph in enumerate(self._graphs, start=1):
            if graph.kind == "prefill":
                self.prefill([Prompt(slot=0, token_ids=[0] * graph.size, is_kept=False)])
            else:
                self.decode(zeros, zeros, graph.size - 1)
            on_graph(graph, number, len(self._graphs))

    def _run(
        self, step: Callable[..., Tensor], packed: NDArray[np.int32], num_results: int, *arguments: int
    ) -> NextTokens:
        inputs = self._runtime.to_device(torch.from_numpy(packed))
        chosen = self._runtime.run(step, inputs, *arguments).numpy()
        return NextTokens(ids=chosen[0, :num_results].astype(np.int32), logprobs=chosen[1, :num_results])

    def _prefill(self, packed: Tensor) -> Tensor:
        """`packed` is what `pack_prompts` made; the result is float32 [2, B], see `choose_greedily`."""
        last_indexes = packed[-self.num_slots :]
        tokens, segments, positions, slots, cells = packed[: -self.num_slots].reshape(5, -1)
        step = PrefillStep(self._cache, segments=segments, positions=positions, slots=slots, cells=cells)
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=last_indexes,
            slot_step=step,
        )
        return choose_greedily(output.logits[0])

    def _decode(self, packed: Tensor, context_len: int) -> Tensor:
        """`packed` is int32 [2 B], tokens and slot lengths; the result is float32 [2, B]."""
        tokens, positions = packed.reshape(2, -1)
        step = DecodeStep(self._cache, positions=positions, slots=self._slots, context_len=context_len)
        output = self._model(
            input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, slot_step=step
        )
        return choose_greedily(output.logits[:, 0])


def pack_prompts(prompts: Sequence[Prompt], num_tokens: int, num_results: int) -> NDArray[np.int32]:
    """Lay prompts one after the other in one row of `num_tokens` tokens.

    Returns:
        int32 [5 * num_tokens + num_results]: token ids, segments, positions, slots and cells of every token, then the
        index of each prompt's last token. Padding belongs to no prompt's segment and goes to the scratch cell of the
        last prompt's slot; results beyond the number of prompts repeat index 0.
    """
    rows = np.zeros((5, num_tokens), np.int32)
    last_indexes = np.zeros(num_results, np.int32)
    start = 0
    for segment, prompt in enumerate(prompts):
        length = len(prompt.token_ids)
        end = start + length
        positions = np.arange(length)
        rows[0, start:end] = prompt.token_ids
        rows[1, start:end] = segment
        rows[2, start:end] = positions
        rows[3, start:end] = prompt.slot
        rows[4, start:end] = positions if prompt.is_kept else prompt.slot_len
        last_indexes[segment] = end - 1
        start = end
    last = prompts[-1]
    rows[1, start:] = len(prompts)
    rows[3, start:] = last.slot
    rows[4, start:] = len(last.token_ids) if last.is_kept else last.slot_len
    return np.concatenate([rows.reshape(-1), last_indexes])
