"""What the benchmark says of a figure."""

import pytest

from bench.bars import Bar, bar_as_json, bars_table


@pytest.mark.parametrize(
    ("relation", "below", "at", "above"),
    [(">=", False, True, True), ("<=", True, True, False), ("=", False, True, False)],
)
def test_a_bar_is_met_as_its_relation_says(relation: str, below: bool, at: bool, above: bool) -> None:
    met = [Bar("figure", value, 2, relation).is_met for value in (1, 2, 3)]
    assert met == [below, at, above]


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    bar = Bar("figure", None, 2, "<=", note="no chip here")
    assert bar.is_met is None
    assert bar_as_json(bar)["is_met"] is None
    assert "not measured" in bars_table([bar])


def test_a_missed_bar_stands_out_in_the_table() -> None:
    table = bars_table([Bar("one", 1.234, 2, ">=", "ms"), Bar("another", 3, 2, ">=")])
    assert table.splitlines()[0].split() == ["one", "1.234", ">=", "2", "ms", "MISSED"]
    assert table.splitlines()[1].split() == ["another", "3", ">=", "2", "met"]
