"""Attention over the slot cache, plugged into transformers by name.

The function that transformers calls in every layer finds the step (what is run and where its keys and values go) in a
context variable, which is set while the model runs. So model code runs unmodified, whatever it passes on to its layers.

Shapes: B slots, T packed prompt tokens, C cells that are read of a slot, H query heads, K key/value heads, G = H / K,
D head size, P key/value heads side by side in a row of the cache.
Scores and their weighted sum are float32: rounding them to bfloat16 first changes greedy answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from tpu_tgi_server.model.cache import Places, StaticCacheXla, fill_rows
from tpu_tgi_server.model.ring import visible_cells

ATTENTION_NAME = "slot_cache"


class Step(Protocol):
    """What one run of the model does with keys and values, layer by layer."""

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
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, K, T, D] to the cache; return what the queries look at, these keys and values."""
        values = finite(values)
        self.cache.write(layer, self.places, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        return keys, values

    def visible(self, _layer: int, window: int | None) -> Tensor:
        """bool [1, 1, 1, T, T], true where a query (row) may see a key (column)."""
        if window not in self.masks:
            distance = self.positions[:, None] - self.positions[None, :]
            mask = (self.segments[:, None] == self.segments[None, :]) & (distance >= 0)
            self.masks[window] = (mask if window is None else mask & (distance < window))[None, None, None]
        return self.masks[window]


@dataclass
class DecodeStep:
    """One token for each slot; a token sees the positions of its own slot up to its own.

    Attributes:
        places: of the B tokens, one in each slot in turn.
        context_len: how many positions are read, more than the largest position that matters.
    """

    cache: StaticCacheXla
    places: Places
    context_len: int
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, K, 1, D] to the cache; return the cells of the context, each [B, K / P, C, P D]."""
        self.cache.write(layer, self.places, keys[:, :, 0], finite(values)[:, :, 0])
        return self.cache.read(layer, self.context_len)

    def visible(self, layer: int, window: int | None) -> Tensor:
        """bool [B, 1, 1, 1, C], true where a slot's query may see a cell."""
        ring_len = self.cache.ring_len(layer)
        if (ring_len, window) not in self.masks:
            mask = visible_cells(self.places.positions, min(self.context_len, ring_len), ring_len, window)
            self.masks[ring_len, window] = mask[:, None, None, None, :]
        return self.masks[ring_len, window]


def finite(values: Tensor) -> Tensor:
    """Values that a weight of 0 hides: a prompt that overflows would reach its neighbours and the slot's next request.

    Keys need no such care, as hidden scores are replaced.
    """
    limits = torch.finfo(values.dtype)
    return values.masked_fill(values.isnan(), 0).clamp(limits.min, limits.max)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_kv_heads: int,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Grouped-query attention that never repeats keys and values, and makes no float32 copy of them on a TPU.

    The queries of a group are rows of one matrix, so that the product reads every key once, and converts it on the way.

    Args:
        query: [N, H, T, D].
        keys: [N, K / P, C, P D], P heads side by side; P is 1 unless the cache says otherwise.
        values: [N, K / P, C, P D].
        num_kv_heads: K.
        visible: bool, broadcast to [N, K, G, T, C].
        scaling: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2; None for off.

    Returns:
        [N, T, H, D], in the query's dtype.
    """
    num_rows, num_heads, num_tokens, head_size = query.shape
    num_side_by_side = keys.shape[-1] // head_size
    grouped = (query.float() * scaling).reshape(num_rows, num_kv_heads, -1, head_size)
    # a product of matrices would fold [N, K] into one axis, and a split of the heads over cores would be lost
    products = torch.einsum("nkrd,nkcd->nkrc", spread(grouped, num_side_by_side), keys.float())
    scores = products.reshape(num_rows, keys.shape[1] * num_side_by_side, -1, num_tokens, keys.shape[2])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~visible, torch.finfo(torch.float32).min), dim=-1)
    sums = torch.einsum("nkrc,nkcd->nkrd", weights.reshape(products.shape), values.float())
    output = gather(sums, num_side_by_side)[:, :num_kv_heads]
    return output.reshape(num_rows, num_heads, num_tokens, head_size).transpose(1, 2).to(query.dtype)


def spread(queries: Tensor, num_side_by_side: int) -> Tensor:
    """[N, K, R, D] to [N, K / P, P R, P D]: in a row of P heads a query stands where its own head is, beside zeros."""
    if num_side_by_side == 1:
        return queries
    num_rows, _, num_queries, head_size = queries.shape
    filled = fill_rows(queries, num_side_by_side)
    heads = filled.reshape(num_rows, -1, num_side_by_side, num_queries, 1, head_size)
    blocks = heads * diagonal(num_side_by_side, queries.device)[:, None, :, None]
    return blocks.reshape(num_rows, -1, num_side_by_side * num_queries, num_side_by_side * head_size)


def gather(sums: Tensor, num_side_by_side: int) -> Tensor:
    """[N, K / P, P R, P D] to [N, K, R, D]: of the weighted sums over rows of P heads, each head's own."""
    if num_side_by_side == 1:
        return sums
    num_rows, _, num_queries, row_size = sums.shape
    sizes = (num_side_by_side, num_queries // num_side_by_side, num_side_by_side, row_size // num_side_by_side)
    blocks = sums.reshape(num_rows, -1, *sizes) * diagonal(num_side_by_side, sums.device)[:, None, :, None]
    return blocks.sum(-2).reshape(num_rows, -1, sizes[1], sizes[3])


def diagonal(size: int, device: torch.device) -> Tensor:
    """float32 [size, size], ones on the diagonal."""
    numbers = torch.arange(size, dtype=torch.int32, device=device)
    return (numbers[:, None] == numbers[None, :]).float()


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
    return attend(query, keys, values, key.shape[1], visible, scaling, softcap), None


def register() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers.

    No mask function is registered beside it: for a name without one, transformers skips mask building altogether,
    while even an empty one would have it search the positions for packed sequences in every graph.
    """
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
