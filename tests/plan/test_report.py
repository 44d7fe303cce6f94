"""The lines of a plan."""

from dataclasses import replace

import pytest

from tests.plan.test_figures import COMPILED, GB, TRACED
from tpu_tgi_server.plan.chips import Tpu
from tpu_tgi_server.plan.messages import Compiled
from tpu_tgi_server.plan.report import fits, report

EXCHANGING = replace(
    COMPILED,
    num_collectives={"all-reduce": 65, "all-gather": 1},
    collective_bytes={"all-reduce": 4_200_000, "all-gather": 2000},
)
SPREAD = replace(TRACED, num_cores=4)


def text(tpu: Tpu, results: dict[str, Compiled | str], traced: object = TRACED) -> str:
    return "\n".join(report(tpu, 8, traced, results))  # type: ignore[arg-type]


def test_a_graph_is_a_row_under_its_columns_whatever_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    header, row, *_ = text(Tpu.V5E_1, {"decode 2048 greedy": COMPILED}).splitlines()
    assert header.split("  ")[0] == "graph"
    assert row.split() == [
        "decode", "2048", "greedy", "8.000", "2.000", "2.000", "0.500", "12.000", "1", "4", "of", "4", "0", "1.0", "s"
    ]  # fmt: skip
    for name, value in (("arguments", "8.000"), ("temporary", "0.500"), ("compile", "1.0 s")):
        assert header.index(name) + len(name) == row.rindex(value) + len(value)


def test_memory_of_a_chip_is_listed_down_to_what_is_left() -> None:
    lines = [line.split() for line in text(Tpu.V5E_1, {"a": COMPILED}).splitlines()]
    for row in (["weights", "6.000"], ["cache", "2.000"], ["temporary", "0.500"], ["programs", "0.250"]):
        assert row in lines
    assert ["left", "8.161"] in lines
    assert ["limit", "16.911"] in lines


def test_with_replicas_each_chip_has_its_own_slots() -> None:
    said = text(Tpu.V5E_4, {"a": COMPILED})
    assert "fits v5e-4: each chip has the whole model and 8 slots" in said
    assert "most slots a chip" in said
    assert "at least 8.55 ms" in said
    assert "at most 3,744 tokens/s with 8 slots a chip" in said


def test_with_one_model_over_all_chips_they_share_the_slots_and_exchange_data() -> None:
    said = text(Tpu.V5E_4, {"a": EXCHANGING}, SPREAD)
    assert "fits v5e-4: each chip has its part of the model and of all 8 slots" in said
    assert "at most 936 tokens/s with 8 slots\n" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["a", "all-reduce", "65", "4.200"] in rows
    assert ["a", "all-gather", "1", "0.002"] in rows


def test_a_graph_that_is_refused_is_a_row_of_dashes_and_a_reason_and_nothing_fits() -> None:
    results: dict[str, Compiled | str] = {"a": COMPILED, "b": "Ran out of memory " + "x" * 1000}
    said = text(Tpu.V5E_1, results)
    assert ["b", *["-"] * 9] in [line.split() for line in said.splitlines()]
    assert "b does not compile: Ran out of memory" in said
    assert max(map(len, said.splitlines())) < 400
    assert "does not fit v5e-1" in said
    assert not fits(Tpu.V5E_1, TRACED, results)


def test_what_compiles_but_leaves_no_room_does_not_fit() -> None:
    too_large = {"a": replace(COMPILED, temporary_bytes=10 * GB)}
    assert "does not fit v5e-1" in text(Tpu.V5E_1, dict(too_large))
    assert not fits(Tpu.V5E_1, TRACED, too_large)
    assert fits(Tpu.V5E_1, TRACED, {"a": COMPILED})
