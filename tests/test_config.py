"""Settings: what is legal, and what `auto` means."""

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from tpu_tgi_server.config import MAX_SOCKET_PATH_BYTES, Device, Parallel, Settings, resolve_device, settings_from


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"max_batch_size": 0}, "--max-batch-size"),
        ({"replicas": 0}, "--replicas"),
        ({"replicas": 2, "parallel": Parallel.TENSOR}, "--replicas"),
        ({"max_total_tokens": 1}, "--max-total-tokens"),
        ({"max_input_tokens": 0}, "--max-input-tokens"),
        ({"max_input_tokens": 64, "max_total_tokens": 64}, "--max-input-tokens"),
        *(({"step_timeout_s": seconds}, "--step-timeout") for seconds in (0, -1.0, nan, inf, 1e10)),
        *(({"load_timeout_s": seconds}, "--load-timeout") for seconds in (0, -1.0, nan, inf, 1e10)),
        *(({"watermark_gamma": gamma}, "WATERMARK_GAMMA") for gamma in (0, 1, -0.5, 2, nan, inf, -inf)),
        *(({"watermark_delta": delta}, "WATERMARK_DELTA") for delta in (1e30, -1001, nan, inf, -inf)),
        ({"parallel": Parallel.TENSOR, "device": Device.CPU}, "--parallel tensor needs --device tpu or xla-cpu"),
        ({"uds_path": Path("/tmp") / ("x" * 200)}, "--uds-path"),
    ],
)
def test_bad_value_names_its_flag(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        Settings("model", **fields)


def test_environment_says_how_many_replicas_there_are() -> None:
    settings = settings_from({"PARALLEL": "replica", "REPLICAS": "3"}, model_id="model")
    assert (settings.parallel, settings.replicas) == (Parallel.REPLICA, 3)


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("PARALLEL", "both", "PARALLEL must be auto or replica or tensor, not 'both'"),
        ("REPLICAS", "two", "REPLICAS must be a whole number, not 'two'"),
    ],
)
def test_bad_variable_is_named_with_what_it_must_be(variable: str, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings_from({variable: text}, model_id="model")


def test_longest_socket_path_is_taken() -> None:
    path = Path("/" + "x" * (MAX_SOCKET_PATH_BYTES - 3))
    assert len(str(Settings("model", uds_path=path).socket_path)) == MAX_SOCKET_PATH_BYTES


def test_socket_is_the_prefix_with_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings("model", uds_path=Path("/run/shard")).socket_path == Path("/run/shard-0")
    monkeypatch.chdir(tmp_path)
    assert Settings("model", uds_path=Path("shard")).socket_path == tmp_path / "shard-0"


@pytest.mark.parametrize("device", [Device.CPU, Device.TPU, Device.XLA_CPU])
def test_given_device_is_taken_whatever_the_environment_says(device: Device, tmp_path: Path) -> None:
    assert resolve_device(device, {"PJRT_DEVICE": "CUDA"}, tmp_path) is device


@pytest.mark.parametrize(("pjrt_device", "device"), [("TPU", Device.TPU), ("CPU", Device.XLA_CPU)])
def test_auto_follows_the_environment(pjrt_device: str, device: Device, tmp_path: Path) -> None:
    assert resolve_device(Device.AUTO, {"PJRT_DEVICE": pjrt_device}, tmp_path) is device


def test_auto_refuses_an_unknown_pjrt_device(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PJRT_DEVICE=CUDA"):
        resolve_device(Device.AUTO, {"PJRT_DEVICE": "CUDA"}, tmp_path)


@pytest.mark.parametrize(
    ("files", "device"),
    [
        ([], Device.CPU),
        (["vfio/vfio"], Device.CPU),
        (["accel"], Device.CPU),
        (["accel0"], Device.TPU),
        (["vfio/vfio", "vfio/0"], Device.TPU),
    ],
)
def test_auto_looks_for_the_device_files_of_a_tpu(files: list[str], device: Device, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert resolve_device(Device.AUTO, {}, tmp_path) is device
