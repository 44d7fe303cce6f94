"""Arithmetic of a plan, against numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import pytest

from tpu_tgi_server.plan.check import findings, memory_ratio
from tpu_tgi_server.plan.chips import CHIPS, Tpu
from tpu_tgi_server.plan.figures import decode_floor_s, largest_batch, max_tokens_a_second, memory_of
from tpu_tgi_server.plan.messages import REFERENCE, Compiled, Traced

GB = 10**9
TRACED = Traced(
    modules={}, num_graphs=24, num_cores=1, max_input_tokens=128, max_total_tokens=2048, dtype="bfloat16",
    weights_bytes=6 * GB, streamed_bytes=5 * GB, cache_bytes=2 * GB, cache_sizes=[128], num_cache_buffers=4,
)  # fmt: skip
COMPILED = Compiled(
    num_donors=4, num_aliased=4, argument_bytes=8 * GB, output_bytes=2 * GB, aliased_bytes=2 * GB,
    temporary_bytes=GB // 2, code_bytes=GB // 4, accessed_bytes=12e9, flops=1e9, num_cache_copies=0, compile_s=1.0,
)  # fmt: skip


def test_memory_adds_up_to_the_limit() -> None:
    memory = memory_of(TRACED, {"a": COMPILED, "b": replace(COMPILED, temporary_bytes=0)}, CHIPS["v5e"])
    assert memory is not None
    assert (memory.temporary, memory.programs) == (GB // 2, GB // 2)
    assert memory.left == 15.75 * 2**30 - 9 * GB
    assert largest_batch(memory, num_slots=8) == int((15.75 * 2**30 - 6.5 * GB) / (2.5 * GB / 8))


def test_nothing_is_said_about_memory_if_a_graph_does_not_compile() -> None:
    assert memory_of(TRACED, {"a": COMPILED, "b": "refused"}, CHIPS["v5e"]) is None


def test_floor_reads_streamed_weights_and_cache_once() -> None:
    assert decode_floor_s(TRACED, CHIPS["v5e"]) == pytest.approx(7 / 819)
    assert max_tokens_a_second(TRACED, Tpu.V5E_4, num_slots=8) == pytest.approx(4 * 8 * 819 / 7)
    assert max_tokens_a_second(replace(TRACED, num_cores=4), Tpu.V5E_4, num_slots=8) == pytest.approx(8 * 819 / 7)


def test_output_over_an_argument_costs_no_memory() -> None:
    assert memory_ratio(COMPILED, TRACED) == pytest.approx(8.5 / 8)


@pytest.mark.parametrize(
    ("worse", "complaint"),
    [
        ({"num_aliased": 3}, "3 of 4 cache buffers"),
        ({"num_cache_copies": 1}, "1 copies of the cache"),
        ({"temporary_bytes": GB}, "memory 1.125"),
        ({"accessed_bytes": 12.6e9}, "traffic 1.260"),
    ],
)
def test_a_decode_graph_above_a_bar_is_found(worse: dict[str, Any], complaint: str) -> None:
    results = {"decode 2048 greedy": replace(COMPILED, **worse), REFERENCE: replace(COMPILED, accessed_bytes=10e9)}
    (bad,) = [finding for finding in findings(TRACED, results) if not finding.is_good]
    assert complaint in bad.what


def test_a_graph_that_does_not_compile_is_found() -> None:
    (bad,) = [finding for finding in findings(TRACED, {"a": "refused", REFERENCE: COMPILED}) if not finding.is_good]
    assert bad.what == "does not compile: refused"


def test_over_several_cores_exchanges_beyond_four_a_layer_are_found() -> None:
    spread = replace(TRACED, num_cores=4)
    counts = {"all-reduce": 5, "all-gather": 5}
    exchanging = replace(COMPILED, num_collectives=counts, collective_bytes=dict.fromkeys(counts, 10**6))
    assert all(finding.is_good for finding in findings(spread, {"decode 2048 greedy": exchanging}))
    counts["all-gather"] = 8
    (bad,) = [finding for finding in findings(spread, {"decode 2048 greedy": exchanging}) if not finding.is_good]
    assert "5 all-reduce (1.00 MB), 8 all-gather (1.00 MB)" in bad.what
