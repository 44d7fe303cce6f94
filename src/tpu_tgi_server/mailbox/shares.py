"""What part of the machine each agent gets, as variables that its process must have before it loads any library."""

import os
from collections.abc import Mapping
from pathlib import Path

from tpu_tgi_server.config import Device, Parallel, Settings

NUM_THREADS = "OMP_NUM_THREADS"
"""How many threads torch takes on the CPU."""

VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"

ONE_CHIP = {
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
"""What libtpu needs to know in each of several processes with one chip each. JAX's own tests on TPUs do the same."""

Share = Mapping[str, str]
"""Variables of one agent's environment, besides those of the root."""


def share_out(
    settings: Settings, environment: Mapping[str, str], num_cores: int | None = None, dev_folder: Path = Path("/dev")
) -> list[Share]:
    """One share for each agent. A single agent has the machine as it is, so its share is empty.

    Args:
        settings: with a device that is not `auto` any more.
        environment: the root's.
        num_cores: of the CPU; None for those that this process may use.
        dev_folder: where the chips are.

    Raises:
        ValueError: there are fewer chips than replicas.
    """
    chips = tpu_chips(environment, dev_folder) if settings.device is Device.TPU else []
    num_agents = settings.replicas or (len(chips) if settings.parallel is Parallel.REPLICA else 1) or 1
    if num_agents == 1:
        return [{}]
    if settings.device is Device.TPU:
        if num_agents > len(chips):
            raise ValueError(f"--replicas {num_agents} is more than this host has chips, {len(chips)}")
        return [{VISIBLE_CHIPS: chip, **ONE_CHIP} for chip in chips[:num_agents]]
    num_threads = max(1, (num_cores or len(os.sched_getaffinity(0))) // num_agents)
    return [{NUM_THREADS: environment.get(NUM_THREADS) or str(num_threads)}] * num_agents


def tpu_chips(environment: Mapping[str, str], dev_folder: Path) -> list[str]:
    """The numbers of the chips of this host: those that TPU_VISIBLE_CHIPS names, else one for each device file."""
    if visible := environment.get(VISIBLE_CHIPS):
        return visible.split(",")
    # accel0 on v4 and older hosts, vfio/0 on v5e and newer; a bare /dev/vfio/vfio exists without any TPU
    files = [*dev_folder.glob("accel[0-9]*"), *(dev_folder / "vfio").glob("[0-9]*")]
    return [str(number) for number in range(len(files))]
