"""The limits that follow from settings and model, and what loading reports."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_model import MAX_POSITIONS
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.loading import STAGES, load_generator, resolve_limits
from tpu_tgi_server.engine.types import Limits
from tpu_tgi_server.runtime.cpu import CpuRuntime


@pytest.mark.parametrize(
    ("fields", "max_positions", "limits"),
    [
        ({}, 8192, Limits(8, 2047, 2048)),
        ({}, 512, Limits(8, 511, 512)),
        ({}, None, Limits(8, 2047, 2048)),
        ({"max_total_tokens": 4096, "max_batch_size": 3}, 8192, Limits(3, 4095, 4096)),
        ({"max_total_tokens": 100, "max_input_tokens": 60}, 512, Limits(8, 60, 100)),
        ({"max_input_tokens": 60}, 512, Limits(8, 60, 512)),
        ({"max_input_tokens": 3000}, 8192, Limits(8, 3000, 5048)),
        ({"max_input_tokens": 7000}, 8192, Limits(8, 7000, 8192)),
    ],
)
def test_limits_are_what_is_asked_for_or_what_the_model_has(
    fields: dict[str, Any], max_positions: int | None, limits: Limits
) -> None:
    assert resolve_limits(Settings("m", **fields), SimpleNamespace(max_position_embeddings=max_positions)) == limits


@pytest.mark.parametrize(
    ("fields", "flag"),
    [({"max_total_tokens": 513}, "--max-total-tokens 513"), ({"max_input_tokens": 512}, "--max-input-tokens 512")],
)
def test_limits_beyond_the_model_are_refused_by_name_of_the_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        resolve_limits(Settings("m", **fields), SimpleNamespace(max_position_embeddings=512))


def test_loading_reports_each_stage_as_it_ends(tiny_model_folder: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    settings = Settings(str(tiny_model_folder), device=Device.CPU)
    _, info = load_generator(settings, CpuRuntime(), lambda *stage: stages.append(stage))
    assert stages == [(name, number, len(STAGES)) for number, name in enumerate(STAGES, start=1)]
    assert info.limits == Limits(8, MAX_POSITIONS - 1, MAX_POSITIONS)
    assert (info.folder, info.dtype, info.device_type) == (str(tiny_model_folder), "torch.float32", "cpu")
    assert info.sliding_window is None


def test_weights_of_an_overriding_folder_are_loaded_with_the_model_s_config_and_tokenizer(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    model, weights = tmp_path / "model", tmp_path / "weights"
    model.mkdir()
    weights.mkdir()
    for path in tiny_model_folder.iterdir():
        target = weights if path.suffix == ".safetensors" else model
        (target / path.name).symlink_to(path)
    settings = Settings(str(model), device=Device.CPU, weights_cache_override=weights)
    _, info = load_generator(settings, CpuRuntime(), lambda *_: None)
    assert info.folder == str(model)
