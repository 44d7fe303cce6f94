"""The KV cache: for every layer one tensor of keys and one of values, written in place.

A cell is named by (slot, head, position). The cells of a slot at its length and beyond are scratch: padding and idle
slots may write there, because a real token overwrites the cell before any query can see it.

A TPU keeps the last dimension of a tensor in lanes of 128. Where heads are smaller than that, P of them stand side by
side in one row: otherwise its compiler stores the cache with positions last, and turns all of it round and back for
every write.
"""

import torch
from torch import Tensor

NUM_LANES = 128


def heads_a_row(num_heads: int, head_size: int) -> int:
    """How many heads fill rows of whole lanes: the least divisor of `num_heads` that does, or 1 if none does."""
    sizes = (size for size in range(1, num_heads + 1) if num_heads % size == 0)
    return next((size for size in sizes if size * head_size % NUM_LANES == 0), 1)


class StaticCacheXla:
    """Owns the keys and values of all slots and layers.

    The tensors are allocated once and never rebound, and writes go to the base tensors through index tensors: that is
    the form for which torch_xla 2.9 donates the buffer, so that a step updates the cache without copying it
    (a write through a view does not).

    Attributes:
        keys: one tensor [B, K / P, S, P D] a layer.
        values: the same for the values.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]) -> None:
        self.keys = keys
        self.values = values
        num_rows = keys[0].shape[1]
        self._rows = torch.arange(num_rows, dtype=torch.int32)[None, :].to(keys[0].device)

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
        index = (slots[:, None], self._rows, positions[:, None])
        for tensor, cells in ((self.keys[layer], keys), (self.values[layer], values)):
            tensor.index_put_(index, cells.reshape(cells.shape[0], tensor.shape[1], tensor.shape[3]))

    def read(self, layer: int, context_len: int) -> tuple[Tensor, Tensor]:
        """The first `context_len` positions of all slots: keys and values, each [B, K / P, context_len, P D]."""
        return self.keys[layer][:, :, :context_len], self.values[layer][:, :, :context_len]
