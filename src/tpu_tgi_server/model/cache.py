"""The KV cache: for every layer one tensor of keys and one of values, written in place.

A cell is named by (slot, head, cell of the slot), and which position is in which cell is `model.ring`'s rule: a layer
with a sliding window has fewer cells than the slot has positions. The positions of a slot at its length and beyond are
scratch: padding and idle slots may write there, because a real token overwrites the cell before any query can see it.

How the heads of a position lie in rows is told in `model.head_rows`.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpu_tgi_server.model.head_rows import HeadRows, to_rows
from tpu_tgi_server.model.ring import ring_cells


@dataclass(frozen=True)
class CacheSizes:
    """What a cache is made for.

    Attributes:
        num_slots: B.
        max_slot_len: S, how many positions a slot has.
        max_step_tokens: how many of them are written at most before the first of them is looked at: the tokens of a
            chunk, or the decode steps that are started together.
    """

    num_slots: int
    max_slot_len: int
    max_step_tokens: int


@dataclass
class Places:
    """Owns where one step writes, and the index for it, made once for all layers of one length.

    Attributes:
        slots: int32 [N], the slot of each of N tokens.
        positions: int32 [N], the position in that slot.
    """

    slots: Tensor
    positions: Tensor
    indexes: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def index(self, rows: Tensor, ring_len: int) -> tuple[Tensor, ...]:
        """Slot, row of heads and cell, each to be broadcast to [N, H], in layers with so many cells a slot.

        Args:
            rows: int32 [1, H], the rows of heads.
            ring_len: R.
        """
        if ring_len not in self.indexes:
            index: tuple[Tensor, ...] = (self.slots[:, None], rows, ring_cells(self.positions, ring_len)[:, None])
            if rows.device.type == "cpu":  # torch would make the same of it in every write
                broadcast = torch.broadcast_tensors(*index)  # type: ignore[no-untyped-call]
                index = tuple(part.long().contiguous() for part in broadcast)
            self.indexes[ring_len] = index
        return self.indexes[ring_len]


class StaticCacheXla:
    """Owns the keys and values of all slots and layers.

    The tensors are allocated once and never rebound, and writes go to the base tensors through index tensors: that is
    the form for which torch_xla 2.9 donates the buffer, so that a step updates the cache without copying it
    (a write through a view does not).

    Attributes:
        keys: one tensor [B, H, R, W] a layer, H rows of W numbers a cell, where R may differ from layer to layer.
        values: the same for the values.
        max_slot_len: S, how many positions a slot has.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], max_slot_len: int) -> None:
        self.keys = keys
        self.values = values
        self.max_slot_len = max_slot_len
        num_rows = keys[0].shape[1]
        self._rows = torch.arange(num_rows, dtype=torch.int32)[None, :].to(keys[0].device)

    def ring_len(self, layer: int) -> int:
        """R, how many cells of a slot a layer has."""
        return self.keys[layer].shape[2]

    def write(self, layer: int, places: Places, keys: Tensor, values: Tensor) -> None:
        """Write one cell for each of N tokens.

        Args:
            layer: the layer's index.
            places: of the N tokens.
            keys: [N, K, D].
            values: [N, K, D].
        """
        index = places.index(self._rows, self.ring_len(layer))
        for tensor, cells in ((self.keys[layer], keys), (self.values[layer], values)):
            tensor.index_put_(index, to_rows(cells, HeadRows(tensor.shape[1], tensor.shape[3])))

    def read(self, layer: int, context_len: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots in the first `context_len` cells, or all, if a layer has fewer.

        Returns:
            Each [B, H, C, W].
        """
        return self.keys[layer][:, :, :context_len], self.values[layer][:, :, :context_len]
