"""The table of batches by itself."""

import pytest

from tpu_tgi_server.engine.batches import BatchTable
from tpu_tgi_server.engine.types import CachedBatch, EngineError, ErrorKind


@pytest.fixture
def table() -> BatchTable:
    table = BatchTable()
    table.add(1, [10, 11])
    table.add(2, [20, 21, 22])
    return table


def test_merge_keeps_arrival_order_and_reports_who_is_not_named(table: BatchTable) -> None:
    dropped = table.merge([CachedBatch(2, (22, 20), 0), CachedBatch(1, (11,), 0)])
    assert table.request_ids(2) == (20, 22, 11)
    assert sorted(dropped) == [10, 21]
    assert 1 not in table


def test_merge_does_not_take_requests_that_the_batch_does_not_have(table: BatchTable) -> None:
    table.merge([CachedBatch(1, (10, 20, 99), 0)])
    assert (table.request_ids(1), table.request_ids(2)) == ((10,), (20, 21, 22))


def test_merge_of_a_batch_named_twice_keeps_what_either_names(table: BatchTable) -> None:
    assert table.merge([CachedBatch(2, (20,), 0), CachedBatch(2, (22, 20), 0)]) == [21]
    assert table.request_ids(2) == (20, 22)


@pytest.mark.parametrize(
    ("batch_ids", "kind"), [((), ErrorKind.INVALID), ((1, 3), ErrorKind.UNKNOWN_BATCH), ((3,), ErrorKind.UNKNOWN_BATCH)]
)
def test_refused_merge_changes_nothing(table: BatchTable, batch_ids: tuple[int, ...], kind: ErrorKind) -> None:
    with pytest.raises(EngineError) as refusal:
        table.merge([CachedBatch(id, (), 0) for id in batch_ids])
    assert refusal.value.kind is kind
    assert sorted(table.all_request_ids()) == [10, 11, 20, 21, 22]


def test_keep_removes_a_batch_of_which_nothing_is_left(table: BatchTable) -> None:
    assert table.keep(1, []) == [10, 11]
    assert 1 not in table
    assert table.keep(2, {21}) == [20, 22]
    assert table.request_ids(2) == (21,)


def test_unknown_batches_are_empty(table: BatchTable) -> None:
    assert table.request_ids(9) == ()
    assert table.keep(9, [10]) == []
    table.remove(9)
    assert 9 not in table
    assert len(table.all_request_ids()) == 5
