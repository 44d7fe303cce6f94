"""The green list of a watermark: which tokens are favoured after which token (Kirchenbauer et al. 2023).

The rule is TGI's, so that its detector finds the mark: a permutation of the vocabulary by torch's CPU generator, seeded
with 15485863 times the previous token, of which the first part is green.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

HASH_KEY = 15485863
CACHE_SIZE = 4096


class Watermark:
    """Owns the green lists that were needed lately."""

    def __init__(self, vocab_size: int, gamma: float) -> None:
        self._vocab_size = vocab_size
        self._num_green = int(vocab_size * gamma)
        self.green_bits = lru_cache(CACHE_SIZE)(self._green_bits)

    def _green_bits(self, previous_id: int) -> NDArray[np.int32]:
        """int32 [ceil(V / 32)], bit set for the tokens that are favoured after `previous_id`, lowest bit first."""
        import torch  # here, so that an engine without watermarks needs no torch

        generator = torch.Generator().manual_seed(HASH_KEY * previous_id)
        green = torch.randperm(self._vocab_size, generator=generator)[: self._num_green].numpy()
        is_green = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        is_green[green] = True
        return np.packbits(is_green, bitorder="little").view(np.int32)
