"""A slot's cells in one layer are a ring: position p goes to cell p mod R, so a sliding window never runs out of cells.

A layer without a window has a cell for every position of the slot, and its ring does not turn.

Where it does, a write takes the cell of an older position. That is harmless while no query sees so far back. A step
writes at most `max_step_tokens` positions from the slot's length on, some of which may be scratch, and its first query
is at the slot's length: R holds what that query sees and what is written from there on.
"""

import torch
from torch import Tensor

LENGTH_UNIT = 16
"""A TPU stores 16 cells of bfloat16 together."""


def ring_len(window: int | None, max_step_tokens: int, max_slot_len: int) -> int:
    """R, how many cells of a slot a layer has.

    Args:
        window: how many positions a query of the layer sees, its own included; None for all.
        max_step_tokens: how many positions of one slot are written before the first of them is looked at.
        max_slot_len: how many positions a slot has.
    """
    if window is None:
        return max_slot_len
    needed = window + max_step_tokens - 1
    return min(max_slot_len, -(-needed // LENGTH_UNIT) * LENGTH_UNIT)


def ring_cells(positions: Tensor, ring_len: int) -> Tensor:
    """int32 [N], the cells of N positions."""
    return positions % ring_len


def visible_cells(positions: Tensor, num_cells: int, ring_len: int, window: int | None) -> Tensor:
    """Which of the first C cells a query sees: those of its own position and of the earlier ones in its window.

    A cell holds, as far as a query may see it, the last position up to the query's own that goes there.

    Args:
        positions: int32 [N], of the queries.
        num_cells: C.
        ring_len: R.
        window: as for `ring_len`.

    Returns:
        bool [N, C].
    """
    cells = torch.arange(num_cells, dtype=torch.int32, device=positions.device)
    distance = ring_cells(positions, ring_len)[:, None] - cells[None, :]
    # by `%` a chunk of Gemma 2 2B over 8192 positions took libtpu 0.0.21 146 s to compile, and so 30 s
    distance = torch.where(distance < 0, distance + ring_len, distance)
    mask = distance <= positions[:, None]
    return mask if window is None else mask & (distance < window)
