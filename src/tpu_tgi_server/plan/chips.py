"""The TPUs that can be planned for."""

from enum import StrEnum

from tpu_tgi_server.runtime.chips import CHIPS as CHIPS
from tpu_tgi_server.runtime.chips import Chip as Chip


class Tpu(StrEnum):
    """A host of v5e or v6e chips: the sizes that Google Cloud rents out whole."""

    V5E_1 = "v5e-1"
    V5E_4 = "v5e-4"
    V5E_8 = "v5e-8"
    V6E_1 = "v6e-1"
    V6E_4 = "v6e-4"
    V6E_8 = "v6e-8"

    @property
    def chip(self) -> Chip:
        return CHIPS[self.value.split("-")[0]]

    @property
    def num_chips(self) -> int:
        return int(self.value.split("-")[1])


HOSTS = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
"""How the chips of one host stand, by their number."""
