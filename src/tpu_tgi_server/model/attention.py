"""Attention over the slot cache, plugged into transformers by name.

The function that transformers calls in every layer finds the step (what is run and where its keys and values go) in a
context variable, which is set while the model runs. So model code runs unmodified, whatever it passes on to its layers.

Shapes: B slots, T packed prompt tokens, C cells that are read of a slot, K key/value heads, D head size, which the
cache holds in H rows of W numbers, see `model.head_rows`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from tpu_tgi_server.model.cache import Places, StaticCacheXla
from tpu_tgi_server.model.grouped_attention import attend
from tpu_tgi_server.model.ring import visible_cells

ATTENTION_NAME = "slot_cache"

MAX_CELL = 1e18
"""Larger keys and values are none of a working model, and a product of two such is still a float32."""

WHOLE_ROW = (slice(None),)

MIN_SCORES_A_PART = 4096
"""In rows with fewer scores to each of their parts, calling the operator so often takes longer than the scores do."""


class Step(Protocol):
    """What one run of the model does with keys and values, layer by layer.

    Attributes:
        parts: of a row's tokens, which see nothing of each other. A row may also stay whole, as `visible` tells it all.
    """

    @property
    def parts(self) -> Sequence[slice]: ...

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write those of the new tokens to the cache; return all that the queries may look at."""
        ...

    def visible(self, layer: int, window: int | None) -> Tensor:
        """Which of them each query sees, for `attend`."""
        ...


_running_step: ContextVar[Step] = ContextVar("running_step")


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Within, every attention layer takes part in this step."""
    token = _running_step.set(step)
    try:
        yield
    finally:
        _running_step.reset(token)


@dataclass
class PrefillStep:
    """Prompts packed into one row of T tokens; a token sees the tokens of its own prompt up to itself.

    Attributes:
        segments: int32 [T], which prompt a token belongs to.
        positions: int32 [T], the token's position in its prompt.
        places: of the T tokens, where keys and values are written.
    """

    cache: StaticCacheXla
    segments: Tensor
    positions: Tensor
    places: Places
    parts: Sequence[slice] = WHOLE_ROW
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to the cache; return what the queries look at, these keys and values."""
        keys, values = finite(keys), finite(values)
        self.cache.write(layer, self.places, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        return keys, values

    def visible(self, _layer: int, window: int | None) -> Tensor:
        """bool [1, T, T], true where a query (row) may see a key (column)."""
        if window not in self.masks:
            distance = self.positions[:, None] - self.positions[None, :]
            mask = (self.segments[:, None] == self.segments[None, :]) & (distance >= 0)
            self.masks[window] = (mask if window is None else mask & (distance < window))[None]
        return self.masks[window]


@dataclass
class DecodeStep:
    """One token for each slot, or for the first ones; a token sees the positions of its own slot up to its own.

    Attributes:
        places: of the B tokens, one in each of these slots in turn.
        context_len: how many positions are read, more than the largest position that matters.
    """

    cache: StaticCacheXla
    places: Places
    context_len: int
    parts: Sequence[slice] = WHOLE_ROW
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, K, 1, D] to the cache; return the cells of the context, each [B, H, C, W]."""
        self.cache.write(layer, self.places, finite(keys)[:, :, 0], finite(values)[:, :, 0])
        all_keys, all_values = self.cache.read(layer, self.context_len)
        return all_keys[: len(keys)], all_values[: len(keys)]

    def visible(self, layer: int, window: int | None) -> Tensor:
        """bool [B, 1, C], true where a slot's query may see a cell."""
        ring_len = self.cache.ring_len(layer)
        if (ring_len, window) not in self.masks:
            mask = visible_cells(self.places.positions, min(self.context_len, ring_len), ring_len, window)
            self.masks[ring_len, window] = mask[:, None]
        return self.masks[ring_len, window]


def prompts_of_row(segments: Tensor) -> Sequence[slice]:
    """The `parts` of a row of packed prompts, int32 [T]. On a device it stays whole, as a graph must fit all rows."""
    if segments.device.type != "cpu":
        return WHOLE_ROW
    lengths = torch.unique_consecutive(segments, return_counts=True)[1].tolist()
    if len(segments) ** 2 < MIN_SCORES_A_PART * len(lengths):
        return WHOLE_ROW
    return [slice(begin, end) for begin, end in pairwise(accumulate(lengths, initial=0))]


def finite(cells: Tensor) -> Tensor:
    """Keys or values that hidden cells may hold: a prompt that overflows would reach its neighbours and the slot's next
    request, as a weight of 0 does not hide infinity, nor does a mask that is added to an infinite score.
    """
    limit = min(torch.finfo(cells.dtype).max, MAX_CELL)
    return cells.nan_to_num(0.0).clamp(-limit, limit)


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - transformers passes it by position
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer, within `running`.

    Raises:
        NotImplementedError: the model passes attention sinks, which would change the result if they were dropped.
    """
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError("attention sinks are not supported")
    step = _running_step.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = step.store(layer, key, value)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = step.visible(layer, sliding_window)
    if len(step.parts) == 1:
        return attend(query, keys, values, key.shape[1], visible, scaling, softcap), None
    outputs = []
    for part in step.parts:
        queries, of_keys, of_values = (tensor[:, :, part] for tensor in (query, keys, values))
        seen = visible[:, part, part]
        outputs.append(attend(queries, of_keys, of_values, key.shape[1], seen, scaling, softcap))
    return torch.cat(outputs, dim=1), None


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers.

    No mask function is registered beside it: for a name without one, transformers skips mask building altogether,
    while even an empty one would have it search the positions for packed sequences in every graph.
    """
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
