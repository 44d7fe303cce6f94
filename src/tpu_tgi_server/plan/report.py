"""A plan on the terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tpu_tgi_server.plan.chips import Tpu
from tpu_tgi_server.plan.figures import decode_floor_s, largest_batch, max_tokens_a_second, memory_of
from tpu_tgi_server.plan.messages import Compiled, Traced

MAX_REASON = 300
"""Characters of a compiler's refusal that are shown; the rest is a dump of the program."""


def print_plan(
    console: Console, tpu: Tpu, num_slots: int, traced: Traced, results: Mapping[str, Compiled | str]
) -> bool:
    """Print tables of graphs and of memory; whether everything fits."""
    console.print(graph_table(traced, results))
    for name, result in results.items():
        if isinstance(result, str):
            console.print(f"{name} does not compile: {result[:MAX_REASON]}", markup=False)
    memory = memory_of(traced, results, tpu.chip)
    fits = memory is not None and memory.left >= 0
    console.print(f"\n{'fits' if fits else 'does not fit'} {tpu}: each chip has the whole model and {num_slots} slots")
    if memory is not None:
        table = Table("of each chip", "GB", box=None)
        for name in ("weights", "cache", "temporary", "programs", "left", "limit"):
            table.add_row(name, gigabytes(getattr(memory, name)))
        console.print(table)
        console.print(f"most slots a chip, by arithmetic: {largest_batch(memory, num_slots)}")
    floor = decode_floor_s(traced, tpu.chip)
    ceiling = max_tokens_a_second(traced, tpu, num_slots)
    console.print(
        f"a decode step over all {traced.max_total_tokens} positions takes at least {floor * 1e3:.2f} ms "
        f"(bandwidth alone), so {tpu} makes at most {ceiling:,.0f} tokens/s with {num_slots} slots a chip"
    )
    console.print(
        f"{len(results)} of the server's {traced.num_graphs} graphs compiled; no figure was measured on a TPU"
    )
    return fits


def graph_table(traced: Traced, results: Mapping[str, Compiled | str]) -> Table:
    """One row a graph; a dash where the compiler refuses."""
    table = Table(
        "graph", "arguments", "output", "aliased", "temporary", "accessed", "GFLOP", "in place", "copies", "compile",
        box=None,
    )  # fmt: skip
    for name, result in results.items():
        if isinstance(result, str):
            table.add_row(name, *["-"] * 9)
            continue
        table.add_row(
            name,
            gigabytes(result.argument_bytes),
            gigabytes(result.output_bytes),
            gigabytes(result.aliased_bytes),
            gigabytes(result.temporary_bytes),
            gigabytes(result.accessed_bytes),
            f"{result.flops / 1e9:,.0f}",
            f"{result.num_aliased} of {traced.num_cache_buffers}",
            str(result.num_cache_copies),
            f"{result.compile_s:.1f} s",
        )
    return table


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f}"
