"""How key/value heads lie in the rows of the cache.

A TPU keeps the last dimension of a tensor in lanes of 128. Where rows do not fill whole lanes, its compiler stores the
cache with positions last, and turns all of it round and back for every write. So a row is whole lanes: of one head and
zeros, or of P smaller heads side by side.

Shapes: N rows of a batch, K key/value heads, D head size, R queries to each head.
"""

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

NUM_LANES = 128


@dataclass(frozen=True)
class HeadRows:
    """What the cache holds of one position of a layer: `num_rows` rows of `row_size` numbers."""

    num_rows: int
    row_size: int


def head_rows(num_heads: int, head_size: int, num_cores: int = 1) -> HeadRows:
    """The rows of whole lanes that take least memory.

    As many heads share a row as fill whole lanes, and the last row may be partly empty. Each has a row of its own, with
    zeros, where that takes less, and where the cores would not have as many full rows each.
    """
    num_side_by_side = NUM_LANES // gcd(head_size, NUM_LANES)
    shared = HeadRows(-(-num_heads // num_side_by_side), num_side_by_side * head_size)
    alone = HeadRows(num_heads, -(-head_size // NUM_LANES) * NUM_LANES)
    is_even = num_cores == 1 or num_heads % (num_side_by_side * num_cores) == 0
    return shared if is_even and shared.num_rows * shared.row_size <= alone.num_rows * alone.row_size else alone


def heads_a_row(rows: HeadRows, num_heads: int, head_size: int) -> int:
    """P: how many heads stand side by side."""
    return 1 if rows.num_rows == num_heads else rows.row_size // head_size


def to_rows(heads: Tensor, rows: HeadRows) -> Tensor:
    """[N, K, D] to [N, num_rows, row_size], with zeros where no head is."""
    num_heads, head_size = heads.shape[1:]
    filled = fill_rows(heads, heads_a_row(rows, num_heads, head_size))
    return fill_lanes(filled.reshape(len(heads), rows.num_rows, -1), rows.row_size)


def fill_rows(heads: Tensor, num_side_by_side: int) -> Tensor:
    """[N, K, ...] with zeros for the heads that are missing in the last row of P."""
    num_missing = -heads.shape[1] % num_side_by_side
    return pad(heads, [0, 0] * (heads.ndim - 2) + [0, num_missing]) if num_missing else heads


def fill_lanes(rows: Tensor, row_size: int) -> Tensor:
    """[..., D] with zeros up to `row_size`."""
    num_missing = row_size - rows.shape[-1]
    return pad(rows, [0, num_missing]) if num_missing else rows


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
