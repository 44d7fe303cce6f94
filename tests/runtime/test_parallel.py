"""What `--parallel auto` chooses."""

from typing import Any

import pytest

from tpu_tgi_server.config import Device, Parallel
from tpu_tgi_server.runtime.parallel import choose_parallel

GB = 10**9
LLAMA_8B: dict[str, Any] = {"weight_bytes": 16 * GB, "slot_bytes": 268 * 10**6, "num_slots": 16}


@pytest.mark.parametrize(("core_gb", "chosen"), [(16, Parallel.TENSOR), (19, Parallel.REPLICA), (32, Parallel.REPLICA)])
def test_auto_takes_replicas_where_the_model_and_a_useful_cache_fit_one_core(core_gb: int, chosen: Parallel) -> None:
    """16 GB of weights and 4 slots of 0.27 GB, with a tenth of the core left over."""
    assert choose_parallel(Parallel.AUTO, Device.TPU, 8, **LLAMA_8B, core_bytes=core_gb * GB) is chosen


@pytest.mark.parametrize("device", [Device.CPU, Device.XLA_CPU])
def test_auto_takes_one_core_without_a_tpu(device: Device) -> None:
    assert choose_parallel(Parallel.AUTO, device, 4, **LLAMA_8B, core_bytes=GB) is Parallel.AUTO


def test_auto_spreads_nothing_over_one_core_or_where_the_memory_is_unknown() -> None:
    assert choose_parallel(Parallel.AUTO, Device.TPU, 1, **LLAMA_8B, core_bytes=GB) is Parallel.AUTO
    assert choose_parallel(Parallel.AUTO, Device.TPU, 8, **LLAMA_8B, core_bytes=None) is Parallel.REPLICA


@pytest.mark.parametrize("wanted", [Parallel.REPLICA, Parallel.TENSOR])
def test_what_the_operator_asks_for_is_taken(wanted: Parallel) -> None:
    assert choose_parallel(wanted, Device.TPU, 8, **LLAMA_8B, core_bytes=GB) is wanted
