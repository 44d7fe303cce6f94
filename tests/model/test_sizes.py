"""Sizes from a config alone are those of the loaded model."""

from pathlib import Path

import pytest
import torch

from tests.families import save_family
from tpu_tgi_server.config import Device, Quantize, Settings
from tpu_tgi_server.model import loading, sizes
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.cache import CacheSizes
from tpu_tgi_server.model.files import find_model_files
from tpu_tgi_server.runtime.cpu import CpuRuntime


class CompiledRuntime(CpuRuntime):
    """Says that it compiles, so that heads share rows as on a TPU."""

    is_compiled = True


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        *((family, None) for family in ("llama-2", "llama-3", "mixtral", "gemma-2", "gpt-2")),
        *((family, Quantize.INT8) for family in ("llama-2", "llama-3", "mixtral", "gemma-2")),
    ],
)
def test_weights_and_slots_take_what_was_foretold(family: str, quantize: Quantize | None, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    files = find_model_files(Settings(str(tmp_path), device=Device.CPU), lambda *_: None)
    model_class, config = find_model_class(load_config(tmp_path), tmp_path, trust_remote_code=False)
    loaded = loading.load_weights(files, torch.bfloat16, CpuRuntime(), quantize=quantize)
    cache_sizes = CacheSizes(num_slots=1, max_slot_len=64, max_step_tokens=16)
    cache = loading.allocate_cache(loaded.layers, cache_sizes, torch.bfloat16, CompiledRuntime())
    weights = sum(parameter.nbytes for parameter in loaded.module.parameters())
    assert sizes.weight_bytes(model_class, config, torch.bfloat16, quantize) == weights
    slot = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
    assert sizes.slot_bytes(loaded.layers, torch.bfloat16, cache_sizes) == slot
