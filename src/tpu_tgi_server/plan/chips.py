"""The TPUs that can be planned for, and what is published about them."""

from dataclasses import dataclass
from enum import StrEnum


class Tpu(StrEnum):
    """A host of v5e or v6e chips: the sizes that Google Cloud rents out whole."""

    V5E_1 = "v5e-1"
    V5E_4 = "v5e-4"
    V5E_8 = "v5e-8"
    V6E_1 = "v6e-1"
    V6E_4 = "v6e-4"
    V6E_8 = "v6e-8"

    @property
    def chip(self) -> "Chip":
        return CHIPS[self.value.split("-")[0]]

    @property
    def num_chips(self) -> int:
        return int(self.value.split("-")[1])


HOSTS = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
"""How the chips of one host stand, by their number."""


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        name: what libtpu calls its topology.
        memory_bytes: what libtpu 0.0.21 lets one program use; seen as the limit in its own refusals.
        bandwidth: bytes a second between memory and chip, from docs.cloud.google.com/tpu/docs/v5e and v6e.
    """

    name: str
    memory_bytes: int
    bandwidth: float


CHIPS = {
    "v5e": Chip("v5e", memory_bytes=63 << 28, bandwidth=819e9),  # 15.75 GiB
    "v6e": Chip("v6e", memory_bytes=125 << 28, bandwidth=1638e9),  # 31.25 GiB
}
