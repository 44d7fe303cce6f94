"""Attention of a long prompt's next chunk: a token sees what the slot holds of the prompt, up to the token itself."""

from dataclasses import dataclass, field

from torch import Tensor

from tpu_tgi_server.model.attention import finite, visible_positions
from tpu_tgi_server.model.cache import StaticCacheXla


@dataclass
class ChunkStep:
    """T tokens of one slot; a token sees the positions of the slot up to its own.

    Attributes:
        positions: int32 [T], the token's position in the prompt.
        slots: int32 [T], the slot, in every entry.
        cells: int32 [T], where keys and values go: `positions`, or a scratch cell for padding.
        context_len: C, how many positions are read, more than the largest position that matters.
    """

    cache: StaticCacheXla
    positions: Tensor
    slots: Tensor
    cells: Tensor
    context_len: int
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to the cache; return the slot's first C positions, each [1, K, C, D]."""
        values = finite(values)
        self.cache.write(layer, self.slots, self.cells, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        slot = self.slots[:1]
        all_keys, all_values = self.cache.read(layer, self.context_len)
        return all_keys.index_select(0, slot), all_values.index_select(0, slot)

    def visible(self, window: int | None) -> Tensor:
        """bool [1, 1, 1, T, C], true where a query (row) may see a position (column)."""
        if window not in self.masks:
            self.masks[window] = visible_positions(self.positions, self.context_len, window)[None, None, None]
        return self.masks[window]
