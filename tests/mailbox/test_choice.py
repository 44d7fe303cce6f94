"""`--parallel auto` on hosts with and without several chips. Models are really measured, in a process of their own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loguru import logger

from tests.mailbox.mailboxes import agents
from tpu_tgi_server.config import Device, Parallel, Settings
from tpu_tgi_server.mailbox.choice import resolve_parallel
from tpu_tgi_server.mailbox.process import AgentDiedError

V6E = {"TPU_ACCELERATOR_TYPE": "v6e-4"}


@pytest.fixture
def log() -> Iterator[list[str]]:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(message.record["message"]))
    yield lines
    logger.remove(sink)


def host(folder: Path, num_chips: int) -> Path:
    """A /dev with so many chips."""
    (folder / "vfio").mkdir()
    for number in range(num_chips):
        (folder / "vfio" / str(number)).touch()
    return folder


async def resolved(settings: Settings, environment: dict[str, str], dev_folder: Path) -> Parallel:
    chosen = await resolve_parallel(settings, environment, lambda _: None, dev_folder, dev_folder / "no pci")
    assert agents() == []
    return chosen.parallel


async def test_model_that_fits_one_chip_runs_on_each(tmp_path: Path, tiny_model_folder: Path, log: list[str]) -> None:
    settings = Settings(str(tiny_model_folder), device=Device.TPU, logger_level="ERROR")
    assert await resolved(settings, V6E, host(tmp_path, 4)) is Parallel.REPLICA
    assert log == [
        "parallel: replica on 4 chips, as the weights (0.0 GB) and 4 slots (0.0 GB) "
        "fit the 30.2 GB that one chip has for them"
    ]


async def test_model_whose_slots_do_not_fit_one_chip_runs_over_all(
    tmp_path: Path, tiny_model_folder: Path, log: list[str]
) -> None:
    """Of chips that nobody knows, and that count as small ones. A slot has 512 positions of 1024 bytes, 524 kB."""
    num_slots = 2 * 29_250
    settings = Settings(str(tiny_model_folder), device=Device.TPU, logger_level="ERROR", max_batch_size=num_slots)
    assert await resolved(settings, {}, host(tmp_path, 2)) is Parallel.TENSOR
    assert log[0] == "the generation of the chips is not known, so each is taken to have 16.9 GB"
    assert log[1].startswith("parallel: tensor over 2 chips, as the weights (0.0 GB) and 29250 slots (15.3 GB)")


async def test_model_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    settings = Settings(str(tmp_path / "missing"), device=Device.TPU, logger_level="OFF")
    with pytest.raises(AgentDiedError, match="missing"):
        await resolved(settings, V6E, host(tmp_path, 2))
    assert agents() == []


async def test_model_that_cannot_be_served_ends_the_start_with_the_reason(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    folder = tmp_path / "dynamic"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(str(folder), device=Device.TPU, logger_level="OFF")
    with pytest.raises(AgentDiedError, match="has dynamic rotary positions"):
        await resolved(settings, V6E, host(tmp_path, 2))


@pytest.mark.parametrize(("num_chips", "reason"), [(1, "there is no other"), (0, "no other is seen")])
async def test_nothing_is_measured_on_one_chip(num_chips: int, reason: str, tmp_path: Path, log: list[str]) -> None:
    settings = Settings("no model", device=Device.TPU)
    assert await resolved(settings, V6E, host(tmp_path, num_chips)) is Parallel.AUTO
    assert log == [f"parallel: one model on one chip, as {reason}"]


@pytest.mark.parametrize(
    "settings",
    [
        Settings("no model", device=Device.CPU),
        Settings("no model", device=Device.XLA_CPU),
        Settings("no model", device=Device.TPU, parallel=Parallel.TENSOR),
        Settings("no model", device=Device.TPU, parallel=Parallel.REPLICA),
        Settings("no model", device=Device.TPU, replicas=2),
    ],
)
async def test_nothing_is_chosen_on_a_cpu_or_where_the_operator_has_chosen(
    settings: Settings, tmp_path: Path, log: list[str]
) -> None:
    assert await resolved(settings, V6E, host(tmp_path, 4)) is settings.parallel
    assert log == []
