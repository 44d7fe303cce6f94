"""Which generation of TPU a host has."""

from pathlib import Path

import pytest

from tpu_tgi_server.runtime.chips import find_chip


def pci_folder(folder: Path, *numbers: tuple[str, str]) -> Path:
    """Devices on the PCI bus, as the kernel shows them, of these vendors and kinds."""
    for place, (vendor, device) in enumerate(numbers):
        (folder / str(place)).mkdir()
        (folder / str(place) / "vendor").write_text(f"{vendor}\n")
        (folder / str(place) / "device").write_text(f"{device}\n")
    return folder


@pytest.mark.parametrize(
    ("accelerator_type", "gib"),
    [("v2-8", 8), ("v3-8", 16), ("v4-8", 32), ("v5litepod-8", 15.75), ("v5p-8", 95), ("v6e-4", 31.25)],
)
def test_accelerator_type_of_the_vm_says_it(accelerator_type: str, gib: float, tmp_path: Path) -> None:
    chip = find_chip({"TPU_ACCELERATOR_TYPE": accelerator_type}, tmp_path)
    assert chip is not None
    assert chip.memory_bytes == gib * 2**30


@pytest.mark.parametrize("environment", [{}, {"TPU_ACCELERATOR_TYPE": "of-tomorrow"}])
def test_else_the_pci_bus_says_it(environment: dict[str, str], tmp_path: Path) -> None:
    chip = find_chip(environment, pci_folder(tmp_path, ("0x8086", "0x0063"), ("0x1ae0", "0x006f")))
    assert chip is not None
    assert chip.name == "v6e"


def test_host_without_a_chip_that_is_known_has_none(tmp_path: Path) -> None:
    assert find_chip({}, tmp_path / "missing") is None
    assert find_chip({}, pci_folder(tmp_path, ("0x1ae0", "0xffff"), ("0x8086", "0x0063"))) is None
