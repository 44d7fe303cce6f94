"""Two ways to prefill the prompts of one call: packed into one row, as the server does, or one row each, all padded to
the longest. Both write the cache with the same attention function, on plain torch, in this process.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.bars import Bar
from tpu_tgi_server.model import buckets, loading
from tpu_tgi_server.model.attention import WHOLE_ROW, running
from tpu_tgi_server.model.cache import CacheSizes, Places, StaticCacheXla
from tpu_tgi_server.model.files import ModelFiles
from tpu_tgi_server.model.interface import PromptChunk
from tpu_tgi_server.model.ring import visible_cells
from tpu_tgi_server.model.runner import ModelRunner, RunnerLimits
from tpu_tgi_server.runtime.cpu import CpuRuntime

NUM_ROUNDS = 5
MAX_ROW_TOKENS = 1024
MIXES = {
    "8 prompts of 64 tokens": [64] * 8,
    "8 prompts of 8 to 90 tokens": [8, 20, 31, 43, 55, 66, 78, 90],
    "7 prompts of 16 tokens and one of 384": [16] * 7 + [384],
}


@dataclass
class PaddedStep:
    """Prompts in rows of one length, the first at slot 0; a token sees its own row up to itself."""

    cache: StaticCacheXla
    places: Places
    mask: Tensor
    parts: Sequence[slice] = WHOLE_ROW

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [N, K, T, D] to the cache; return them."""
        self.cache.write(layer, self.places, *(part.transpose(1, 2).flatten(0, 1) for part in (keys, values)))
        return keys, values

    def visible(self, _layer: int, _window: int | None) -> Tensor:
        """bool [1, T, T]."""
        return self.mask


def measure_packing(folder: Path) -> list[Bar]:
    """How much longer the padded rows take, and how many tokens each way computes where sizes are buckets."""
    runtime = CpuRuntime()
    loaded = loading.load_weights(ModelFiles(folder, folder), torch.float32, runtime)
    runtime.tune(loaded.module)
    sizes = CacheSizes(num_slots=8, max_slot_len=MAX_ROW_TOKENS, max_step_tokens=MAX_ROW_TOKENS)
    cache = loading.allocate_cache(loaded.layers, sizes, torch.float32, runtime)
    steps = loading.make_steps(loaded.module, cache, 0.0, runtime)
    runner = ModelRunner(runtime, steps, RunnerLimits(MAX_ROW_TOKENS, MAX_ROW_TOKENS, MAX_ROW_TOKENS))

    def packed(lengths: Sequence[int]) -> list[int]:
        chunks = [PromptChunk(slot, prompt_ids(length)) for slot, length in enumerate(lengths)]
        ids: list[int] = runner.prefill(chunks, None).ids.tolist()
        return ids

    def padded(lengths: Sequence[int]) -> list[int]:
        return prefill_padded(loaded.module, cache, lengths)

    return [compare(mix, lengths, packed, padded) for mix, lengths in MIXES.items()]


def prompt_ids(length: int) -> list[int]:
    """Some prompt."""
    return [100 + (37 * position + length) % 1000 for position in range(length)]


@torch.inference_mode()
def prefill_padded(model: torch.nn.Module, cache: StaticCacheXla, lengths: Sequence[int]) -> list[int]:
    """The best next token of each prompt."""
    num_rows, row_len = len(lengths), max(lengths)
    ids = torch.tensor([prompt_ids(length) + [0] * (row_len - length) for length in lengths])
    positions = torch.arange(row_len, dtype=torch.int32)
    slots = torch.arange(num_rows, dtype=torch.int32).repeat_interleave(row_len)
    places = Places(slots, positions.repeat(num_rows))
    step = PaddedStep(cache, places, visible_cells(positions, row_len, row_len, None)[None])
    with running(step):
        hidden = model.base_model(input_ids=ids, position_ids=positions.expand(num_rows, -1), use_cache=False)  # type: ignore[operator]
    last = hidden.last_hidden_state[torch.arange(num_rows), torch.tensor(lengths) - 1]
    best: list[int] = model.get_output_embeddings()(last).argmax(-1).tolist()  # type: ignore[operator]
    return best


def compare(
    mix: str,
    lengths: Sequence[int],
    packed: Callable[[Sequence[int]], list[int]],
    padded: Callable[[Sequence[int]], list[int]],
) -> Bar:
    """The two take turns; medians."""
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    answers = {}
    for _ in range(NUM_ROUNDS):
        for name, prefill in (("packed", packed), ("padded", padded)):
            started = time.perf_counter()
            answers[name] = prefill(lengths)
            seconds[name].append(time.perf_counter() - started)
    if answers["packed"] != answers["padded"]:
        raise RuntimeError(f"{mix}: packed and padded prompts have different next tokens")
    packed_s, padded_s = (statistics.median(times) for times in seconds.values())
    note = f"{1e3 * packed_s:.0f} and {1e3 * padded_s:.0f} ms; {computed_tokens(lengths)} tokens in buckets"
    return Bar(f"prefill of {mix}, padded rows ÷ packed", padded_s / packed_s, 1.0, ">=", note=note)


def computed_tokens(lengths: Sequence[int]) -> str:
    """How many tokens the graphs compute that hold these prompts, packed and padded."""
    sizes = buckets.prefill_buckets(MAX_ROW_TOKENS)
    one_row = buckets.smallest_bucket(sizes, sum(lengths))
    rows = buckets.round_up_to_power_of_two(len(lengths)) * buckets.smallest_bucket(sizes, max(lengths))
    return f"{one_row} and {rows}"
