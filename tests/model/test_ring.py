"""The ring of cells against a plain list of what was written."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_tgi_server.model.ring import LENGTH_UNIT, ring_cells, ring_len, visible_cells

MAX_SLOT_LEN = 70
Content = tuple[int, int] | None
"""Request and position, or None for what is scratch."""


@pytest.mark.parametrize(
    ("window", "max_step_tokens", "max_slot_len", "expected"),
    [
        (None, 512, 8192, 8192),
        (4096, 512, 8192, 4608),
        (512, 512, 8192, 1024),
        (2047, 512, 4096, 2560),
        (1, 16, 100, 16),
        (2, 16, 100, 32),
        (4096, 512, 4096, 4096),
        (4096, 512, 1000, 1000),
    ],
)
def test_ring_holds_window_and_step_in_whole_units_and_never_more_than_the_slot(
    window: int | None, max_step_tokens: int, max_slot_len: int, expected: int
) -> None:
    assert ring_len(window, max_step_tokens, max_slot_len) == expected


@dataclass
class Slot:
    """One slot of one layer, stepped as the server steps it; every query is checked where it is made."""

    window: int | None
    ring_len: int
    request: int = 0
    length: int = 0
    cells: list[Content] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = [None] * self.ring_len

    def write(self, position: int, is_real: bool) -> None:
        cell = int(ring_cells(torch.tensor([position], dtype=torch.int32), self.ring_len))
        self.cells[cell] = (self.request, position) if is_real else None

    def check_query(self, position: int, context_len: int) -> None:
        num_cells = min(context_len, self.ring_len)
        mask = visible_cells(torch.tensor([position], dtype=torch.int32), num_cells, self.ring_len, self.window)
        assert mask.shape == (1, num_cells)
        seen = [self.cells[cell] for cell in mask[0].nonzero()[:, 0].tolist()]
        first = 0 if self.window is None else max(0, position - self.window + 1)
        assert sorted(seen, key=str) == sorted(((self.request, at) for at in range(first, position + 1)), key=str)

    def begin(self, num_tokens: int, row_len: int) -> None:
        """A whole prompt, or the beginning of one, in a row that is padded; it looks at itself, not at the cells."""
        self.request += 1
        self.length = 0
        self._write_row(num_tokens, row_len)

    def chunk(self, num_tokens: int, row_len: int, spare: int) -> None:
        start = self.length
        self._write_row(min(num_tokens, MAX_SLOT_LEN - 1 - start), row_len)
        for position in range(start, self.length):
            self.check_query(position, self.length + spare)

    def _write_row(self, num_tokens: int, row_len: int) -> None:
        for _ in range(num_tokens):
            self.write(self.length, is_real=True)
            self.length += 1
        if num_tokens < row_len:
            self.write(self.length, is_real=False)

    def decode(self, num_steps: int, num_kept: int, spare: int) -> None:
        """Steps that are started together. Tokens after the `num_kept` first are nobody's, or the slot is idle."""
        start = self.length
        for step in range(num_steps):
            position = min(start + step, MAX_SLOT_LEN - 1)
            is_real = step < num_kept and position < MAX_SLOT_LEN - 1
            self.write(position, is_real)
            if is_real:
                self.check_query(position, position + 1 + spare)
                self.length += 1
        if num_kept and num_kept < num_steps:
            self.begin(1, 1)  # only the last steps of a request are thrown away, and the slot is given away then


@given(st.data())
def test_a_query_sees_its_window_and_nothing_else_whatever_was_written_before(data: st.DataObject) -> None:
    """Rings are as short as the rule allows: window and step fill whole units, or have one position more."""
    max_step_tokens = data.draw(st.integers(1, LENGTH_UNIT))
    num_units = data.draw(st.integers(1, 5))
    filling_window = num_units * LENGTH_UNIT - max_step_tokens + 1
    window = data.draw(st.sampled_from([filling_window, filling_window + 1, None]))
    slot = Slot(window, ring_len(window, max_step_tokens, MAX_SLOT_LEN))
    sizes, spares = st.integers(1, max_step_tokens), st.integers(0, 2 * MAX_SLOT_LEN)
    slot.begin(data.draw(sizes), max_step_tokens)
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["begin", "chunk", "chunk", "decode", "decode", "decode", "idle"])):
            case "begin" if data.draw(st.integers(0, 4)) == 0:
                slot.begin(data.draw(sizes), max_step_tokens)
            case "chunk":
                slot.chunk(data.draw(sizes), max_step_tokens, data.draw(spares))
            case "decode":
                num_steps = data.draw(sizes)
                num_kept = data.draw(st.integers(1, num_steps)) if data.draw(st.integers(0, 4)) == 0 else num_steps
                slot.decode(num_steps, num_kept, data.draw(spares))
            case "idle":
                slot.decode(data.draw(sizes), 0, 0)
