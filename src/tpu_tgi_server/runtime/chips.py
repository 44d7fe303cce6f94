"""The generations of TPUs, how to tell which one this host has, and what is published about them.

Reads files of the kernel and the environment, and touches no device.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
"""What a TPU VM is, such as v5litepod-8 or v6e-4."""

GOOGLE = "0x1ae0"
"""The vendor's number on the PCI bus."""

GENERATIONS = {
    "0x0027": "v2",  # v3 has the same number: the one with less memory
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
}
"""By the device's number on the PCI bus, as in jax's `hardware_utils` and torch_xla's `_internal/tpu.py`."""


@dataclass(frozen=True)
class Chip:
    """One core, as XLA sees it: a chip, or half of one on v2 and v3.

    Attributes:
        name: what libtpu calls its topology.
        memory_bytes: what a program may use; of v5e and v6e seen as the limit in libtpu 0.0.21's own refusals, of the
            others what docs.cloud.google.com/tpu/docs gives as the memory.
        bandwidth: bytes a second between memory and core, from the same pages.
    """

    name: str
    memory_bytes: int
    bandwidth: float


CHIPS = {
    "v2": Chip("v2", memory_bytes=8 << 30, bandwidth=350e9),
    "v3": Chip("v3", memory_bytes=16 << 30, bandwidth=450e9),
    "v4": Chip("v4", memory_bytes=32 << 30, bandwidth=1200e9),
    "v5e": Chip("v5e", memory_bytes=63 << 28, bandwidth=819e9),  # 15.75 GiB
    "v5p": Chip("v5p", memory_bytes=95 << 30, bandwidth=2765e9),
    "v6e": Chip("v6e", memory_bytes=125 << 28, bandwidth=1638e9),  # 31.25 GiB
}


def find_chip(environment: Mapping[str, str], pci_folder: Path = Path("/sys/bus/pci/devices")) -> Chip | None:
    """What this host's chips are: by TPU_ACCELERATOR_TYPE, else by the PCI bus. None if neither says."""
    name = re.match(r"[^-]*", environment.get(ACCELERATOR_TYPE, ""))
    generation = name[0].replace("litepod", "e") if name else ""
    if generation in CHIPS:
        return CHIPS[generation]
    for device in sorted(pci_folder.glob("*")):
        if read(device / "vendor") == GOOGLE and (found := GENERATIONS.get(read(device / "device"))):
            return CHIPS[found]
    return None


def read(path: Path) -> str:
    """A small file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
