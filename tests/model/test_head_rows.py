"""How heads lie in the rows of the cache, and that no layout changes what attention makes of them."""

import pytest
import torch

from tpu_tgi_server.model.cache import Places, StaticCacheXla
from tpu_tgi_server.model.grouped_attention import attend
from tpu_tgi_server.model.head_rows import HeadRows, head_rows, heads_a_row, to_rows

NUM_SLOTS, NUM_POSITIONS = 3, 16


@pytest.mark.parametrize(
    ("num_heads", "head_size", "expected"),
    [
        (8, 64, HeadRows(4, 128)),
        (3, 64, HeadRows(2, 128)),
        (1, 64, HeadRows(1, 128)),
        (4, 96, HeadRows(1, 384)),
        (32, 80, HeadRows(4, 640)),
        (4, 80, HeadRows(4, 128)),
        (2, 16, HeadRows(1, 128)),
        (8, 128, HeadRows(8, 128)),
        (4, 256, HeadRows(4, 256)),
        (2, 192, HeadRows(1, 384)),
        (1, 192, HeadRows(1, 256)),
    ],
)
def test_rows_are_whole_lanes_and_take_least_memory(num_heads: int, head_size: int, expected: HeadRows) -> None:
    assert head_rows(num_heads, head_size) == expected


@pytest.mark.parametrize(
    ("num_heads", "num_cores", "expected"),
    [(8, 4, HeadRows(4, 128)), (8, 8, HeadRows(8, 128)), (3, 3, HeadRows(3, 128)), (6, 2, HeadRows(6, 128))],
)
def test_cores_share_rows_only_where_each_gets_as_many_full_ones(
    num_heads: int, num_cores: int, expected: HeadRows
) -> None:
    assert head_rows(num_heads, 64, num_cores) == expected


@pytest.mark.parametrize(
    ("num_heads", "rows", "expected"),
    [(4, HeadRows(4, 8), 1), (4, HeadRows(4, 12), 1), (4, HeadRows(2, 16), 2), (3, HeadRows(2, 16), 2)],
)
def test_a_row_tells_how_many_heads_it_holds(num_heads: int, rows: HeadRows, expected: int) -> None:
    assert heads_a_row(rows, num_heads, head_size=8) == expected


def test_where_no_head_is_there_are_zeros() -> None:
    heads = torch.arange(1.0, 7.0).reshape(1, 3, 2)
    assert to_rows(heads, HeadRows(2, 4)).tolist() == [[[1, 2, 3, 4], [5, 6, 0, 0]]]
    assert to_rows(heads, HeadRows(3, 3)).tolist() == [[[1, 2, 0], [3, 4, 0], [5, 6, 0]]]


@pytest.mark.parametrize(
    "rows",
    [HeadRows(3, 8), HeadRows(2, 16), HeadRows(1, 32), HeadRows(3, 16)],
    ids=["alone", "two, and an empty place", "four, and an empty place", "alone, with zeros"],
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_change_no_result(rows: HeadRows, softcap: float | None) -> None:
    torch.manual_seed(0)
    shape = (NUM_SLOTS, rows.num_rows, NUM_POSITIONS, rows.row_size)
    cache = StaticCacheXla([torch.zeros(shape)], [torch.zeros(shape)], NUM_POSITIONS)
    slots = torch.arange(NUM_SLOTS, dtype=torch.int32)
    keys, values = torch.randn(2, NUM_SLOTS, 3, NUM_POSITIONS, 8)
    for position in range(NUM_POSITIONS):
        places = Places(slots, torch.full_like(slots, position))
        cache.write(0, places, keys[:, :, position], values[:, :, position])
    query = torch.randn(NUM_SLOTS, 6, 1, 8)
    visible = torch.rand(NUM_SLOTS, 1, NUM_POSITIONS) < 0.8
    visible[..., 0] = True
    torch.testing.assert_close(
        attend(query, *cache.read(0, NUM_POSITIONS), 3, visible, 0.3, softcap),
        attend(query, keys, values, 3, visible, 0.3, softcap),
    )
