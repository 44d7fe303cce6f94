"""Attention of a long prompt's next chunk: a token sees what the slot holds of the prompt, up to the token itself."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tpu_tgi_server.model.attention import WHOLE_ROW, finite
from tpu_tgi_server.model.cache import Places, StaticCacheXla
from tpu_tgi_server.model.ring import visible_cells


@dataclass
class ChunkStep:
    """T tokens of one slot; a token sees the positions of the slot up to its own.

    Attributes:
        positions: int32 [T], the token's position in the prompt.
        places: of the T tokens, all in one slot: `positions`, or scratch for padding.
        context_len: how many positions are read, more than the largest position that matters.
    """

    cache: StaticCacheXla
    positions: Tensor
    places: Places
    context_len: int
    parts: Sequence[slice] = WHOLE_ROW
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to the cache; return the slot's first C cells, each [1, H, C, W]."""
        keys, values = finite(keys), finite(values)
        self.cache.write(layer, self.places, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        slot = self.places.slots[:1]
        all_keys, all_values = self.cache.read(layer, self.context_len)
        return all_keys.index_select(0, slot), all_values.index_select(0, slot)

    def visible(self, layer: int, window: int | None) -> Tensor:
        """bool [1, T, C], true where a query (row) may see a cell (column)."""
        ring_len = self.cache.ring_len(layer)
        if (ring_len, window) not in self.masks:
            mask = visible_cells(self.positions, min(self.context_len, ring_len), ring_len, window)
            self.masks[ring_len, window] = mask[None]
        return self.masks[ring_len, window]
