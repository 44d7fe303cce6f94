"""The KV cache: for every layer one tensor of keys and one of values, written in place.

A cell is named by (slot, head, position). The cells of a slot at its length and beyond are scratch: padding and idle
slots may write there, because a real token overwrites the cell before any query can see it.
"""

import torch
from torch import Tensor


class StaticCacheXla:
    """Owns the keys and values of all slots and layers.

    The tensors are allocated once and never rebound, and writes go to the base tensors through index tensors: that is
    the form for which torch_xla 2.9 donates the buffer, so that a step updates the cache without copying it
    (a write through a view does not).

    Attributes:
        keys: one tensor [B, K, S, D] a layer.
        values: the same for the values.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys
        self.values = values
        num_heads = keys[0].shape[1]
        self._heads = torch.arange(num_heads, dtype=torch.int32)[None, :].to(keys[0].device)

    @property
    def max_slot_len(self) -> int:
        """S, how many positions a slot has."""
        return self.keys[0].shape[2]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one cell for each of N tokens.

        Args:
            layer: the layer's index.
            slots: int32 [N].
            positions: int32 [N].
            keys: [N, K, D].
            values: [N, K, D].
        """
        index = (slots[:, None], self._heads, positions[:, None])
        self.keys[layer].index_put_(index, keys)
        self.values[layer].index_put_(index, values)

    def read(self, layer: int, context_len: int) -> tuple[Tensor, Tensor]:
        """The first `context_len` positions of all slots: keys and values, each [B, K, context_len, D]."""
        return self.keys[layer][:, :, :context_len], self.values[layer][:, :, :context_len]
