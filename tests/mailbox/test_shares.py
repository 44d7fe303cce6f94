"""What part of the machine each agent gets."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ROOT
from tpu_tgi_server.config import Device, Parallel, Settings
from tpu_tgi_server.mailbox.shares import share_out


def settings(device: Device, **given: Any) -> Settings:
    return Settings("model", device=device, **given)


@pytest.fixture
def dev_folder(tmp_path: Path) -> Path:
    """A host with four chips."""
    (tmp_path / "vfio").mkdir()
    for name in ("vfio", "0", "1", "2", "3"):
        (tmp_path / "vfio" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("device", "parallel"),
    [(Device.CPU, Parallel.AUTO), (Device.CPU, Parallel.REPLICA), (Device.XLA_CPU, Parallel.TENSOR)],
)
def test_cpu_has_one_agent_that_shares_with_nobody_unless_more_are_asked_for(
    device: Device, parallel: Parallel
) -> None:
    assert share_out(settings(device, parallel=parallel), {}) == [{}]


@pytest.mark.parametrize(("num_replicas", "num_threads"), [(2, 4), (3, 2), (8, 1), (20, 1)])
def test_replicas_on_the_cpu_divide_its_cores(num_replicas: int, num_threads: int) -> None:
    shares = share_out(settings(Device.CPU, replicas=num_replicas), {}, num_cores=8)
    assert shares == [{"OMP_NUM_THREADS": str(num_threads)}] * num_replicas


def test_number_of_threads_that_the_operator_has_given_counts() -> None:
    shares = share_out(settings(Device.CPU, replicas=2), {"OMP_NUM_THREADS": "3"}, num_cores=8)
    assert shares == [{"OMP_NUM_THREADS": "3"}] * 2


def test_torch_takes_the_threads_of_its_share() -> None:
    (share, _) = share_out(settings(Device.CPU, replicas=2), {}, num_cores=2)
    code = f"import os; os.environ.update({share}); import torch; print(torch.get_num_threads())"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == "1"


def test_each_replica_on_a_tpu_has_one_chip(dev_folder: Path) -> None:
    shares = share_out(settings(Device.TPU, parallel=Parallel.REPLICA), {}, dev_folder=dev_folder)
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0", "1", "2", "3"]
    for share in shares:
        assert share["TPU_PROCESS_BOUNDS"] == share["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
        assert share["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "true"


def test_fewer_replicas_than_chips_leave_the_last_ones_alone(dev_folder: Path) -> None:
    shares = share_out(settings(Device.TPU, replicas=2), {}, dev_folder=dev_folder)
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["0", "1"]


def test_only_chips_that_the_operator_lets_be_seen_are_used(dev_folder: Path) -> None:
    environment = {"TPU_VISIBLE_CHIPS": "2,3"}
    shares = share_out(settings(Device.TPU, parallel=Parallel.REPLICA), environment, dev_folder=dev_folder)
    assert [share["TPU_VISIBLE_CHIPS"] for share in shares] == ["2", "3"]


def test_more_replicas_than_chips_are_refused(dev_folder: Path) -> None:
    with pytest.raises(ValueError, match="--replicas 5 is more than this host has chips, 4"):
        share_out(settings(Device.TPU, replicas=5), {}, dev_folder=dev_folder)


@pytest.mark.parametrize("parallel", [Parallel.AUTO, Parallel.TENSOR])
def test_one_agent_on_a_tpu_sees_what_the_root_sees(parallel: Parallel, dev_folder: Path) -> None:
    assert share_out(settings(Device.TPU, parallel=parallel), {}, dev_folder=dev_folder) == [{}]
