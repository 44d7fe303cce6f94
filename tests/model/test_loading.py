"""What fits, and what loading costs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bench.loading import load_in_process, make_model
from tests.servers import ROOT
from tpu_tgi_server.model.cache import CacheSizes
from tpu_tgi_server.model.files import ModelFiles
from tpu_tgi_server.model.loading import allocate_cache, check_cache_fits, load_weights
from tpu_tgi_server.model.probe import AttentionCall
from tpu_tgi_server.runtime.cpu import CpuRuntime

ALLOWANCE_BYTES = 25e6
"""The largest tensor, in the file's dtype: of a model so small it is more than the 15 % that a real one is allowed."""
DEMO_MODEL = ROOT / ".cache/SmolLM2-135M-Instruct"


def test_cache_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(
        ValueError, match=r"KV cache of 8 slots takes 8.0 GB, and 5.5 GB are free.*--max-batch-size to 5"
    ):
        check_cache_fits(8, bytes_a_slot=10**9, free_bytes=5_500_000_000)


@pytest.mark.parametrize("free_bytes", [8 * 10**9, None])
def test_cache_that_fits_or_may_fit_is_accepted(free_bytes: int | None) -> None:
    check_cache_fits(8, bytes_a_slot=10**9, free_bytes=free_bytes)


MISTRAL = AttentionCall(0, 8, 128, 128, window=4096, is_causal=True, has_sinks=False)
"""A layer of Mistral 7B."""
SIZES = CacheSizes(num_slots=2, max_slot_len=32768, max_step_tokens=512)


@pytest.mark.parametrize(
    ("windows", "num_cells"),
    [
        ([4096, 4096], [4608, 4608]),
        ([None, None], [32768, 32768]),
        ([4096, None], [4608, 32768]),
        ([100_000, None], [32768, 32768]),
    ],
)
def test_layer_with_a_window_has_cells_for_the_window_and_a_chunk_only(
    windows: list[int | None], num_cells: list[int]
) -> None:
    layers = [replace(MISTRAL, window=window) for window in windows]
    cache = allocate_cache(layers, SIZES, torch.bfloat16, CpuRuntime())
    shapes = [(2, 8, cells, 128) for cells in num_cells]
    assert [tuple(keys.shape) for keys in cache.keys] == [tuple(values.shape) for values in cache.values] == shapes
    assert cache.max_slot_len == 32768


def test_cache_counts_as_much_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots of two layers, 4608 cells of keys and values, 8 heads of 128 numbers of two bytes."""
    num_bytes = 2 * 2 * 4608 * 2 * 8 * 128 * 2
    monkeypatch.setattr(CpuRuntime, "free_memory_bytes", lambda _: num_bytes)
    cache = allocate_cache([MISTRAL, MISTRAL], SIZES, torch.bfloat16, CpuRuntime())
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == num_bytes
    monkeypatch.setattr(CpuRuntime, "free_memory_bytes", lambda _: num_bytes - 1)
    with pytest.raises(ValueError, match=r"2 slots takes 0.1 GB, .*--max-batch-size to 1,"):
        allocate_cache([MISTRAL, MISTRAL], SIZES, torch.bfloat16, CpuRuntime())


@pytest.fixture(scope="module")
def random_llamas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of 65 million parameters, by the dtype of its file."""
    folders = {dtype: tmp_path_factory.mktemp(dtype) for dtype in ("float32", "bfloat16")}
    for dtype, folder in folders.items():
        make_model(folder, dtype, num_layers=8)
    return folders


@pytest.mark.parametrize(
    ("file_dtype", "served_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "int8")]
)
@pytest.mark.parametrize("device", ["cpu", "xla-cpu"])
def test_host_never_holds_two_copies_of_the_weights(
    random_llamas: dict[str, Path], device: str, file_dtype: str, served_dtype: str
) -> None:
    cost = load_in_process(random_llamas[file_dtype], device, served_dtype)
    assert cost.weights_bytes > 65e6
    assert cost.peak_bytes - cost.bare_bytes < 1.15 * cost.weights_bytes + ALLOWANCE_BYTES


@pytest.mark.demo
@pytest.mark.parametrize("device", ["cpu", "xla-cpu"])
def test_demo_model_takes_little_more_memory_than_its_weights(device: str) -> None:
    assert load_in_process(DEMO_MODEL, device, "float32").ratio < 1.15


def copy_without(name: str, source: Path, target: Path) -> None:
    """A model's folder with one tensor less."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors[name]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_weight_is_named(tmp_path: Path, tiny_model_folder: Path, name: str) -> None:
    folder = tmp_path / "model"
    copy_without(name, tiny_model_folder, folder)
    with pytest.raises(OSError, match=rf"does not hold the weights of this model: {name} is missing"):
        load_weights(ModelFiles(folder, folder), torch.float32, CpuRuntime())


def test_weight_of_another_shape_is_named(tmp_path: Path, tiny_model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(OSError, match=r"model.norm.weight is \[65\] and should be \[64\]"):
        load_weights(ModelFiles(folder, folder), torch.float32, CpuRuntime())


def test_file_that_is_cut_off_is_named(tmp_path: Path, tiny_model_folder: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"model.safetensors is not a file of safetensors"):
        load_weights(ModelFiles(folder, folder), torch.float32, CpuRuntime())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_weights_are_those_that_transformers_loads(tiny_model_folder: Path, dtype: torch.dtype) -> None:
    """Every parameter and buffer, those that no file holds included."""
    ours = load_weights(ModelFiles(tiny_model_folder, tiny_model_folder), dtype, CpuRuntime()).module
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=dtype)
    for kind in ("named_parameters", "named_buffers"):
        expected = dict(getattr(theirs, kind)())
        found = dict(getattr(ours, kind)())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(found[name].dtype == expected[name].dtype for name in expected)
