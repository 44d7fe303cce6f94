"""A plan as lines of text, however narrow the terminal is."""

from collections.abc import Iterator, Mapping, Sequence

from tpu_tgi_server.plan.chips import Tpu
from tpu_tgi_server.plan.figures import decode_floor_s, largest_batch, max_tokens_a_second, memory_of
from tpu_tgi_server.plan.messages import Compiled, Traced

MAX_REASON = 300
"""Characters of a compiler's refusal that are shown; the rest is a dump of the program."""

GRAPH_COLUMNS = (
    "graph", "arguments", "output", "aliased", "temporary", "accessed", "GFLOP", "in place", "copies", "compile"
)  # fmt: skip
MEMORY_ROWS = ("weights", "cache", "temporary", "programs", "left", "limit")


def report(tpu: Tpu, num_slots: int, traced: Traced, results: Mapping[str, Compiled | str]) -> Iterator[str]:
    """The lines of a plan: graphs, memory of a chip, what the cores exchange, and the floor of a decode step."""
    is_spread = traced.num_cores > 1
    yield from table([GRAPH_COLUMNS, *(graph_row(name, result, traced) for name, result in results.items())])
    for name, result in results.items():
        if isinstance(result, str):
            yield f"{name} does not compile: {result[:MAX_REASON]}"
    if is_spread:
        yield ""
        yield from table([("exchange between chips", "what", "number", "MB a chip"), *collective_rows(results)])
    memory = memory_of(traced, results, tpu.chip)
    share = "its part of the model and of all" if is_spread else "the whole model and"
    yield ""
    yield f"{'fits' if fits(tpu, traced, results) else 'does not fit'} {tpu}: each chip has {share} {num_slots} slots"
    if memory is not None:
        sizes = ((name, gigabytes(getattr(memory, name))) for name in MEMORY_ROWS)
        yield from table([("of each chip", "GB"), *sizes])
        of = "" if is_spread else " a chip"
        yield f"most slots{of}, by arithmetic: {largest_batch(memory, num_slots)}"
    floor = decode_floor_s(traced, tpu.chip)
    ceiling = max_tokens_a_second(traced, tpu, num_slots)
    yield (
        f"a decode step over all {traced.max_total_tokens} positions takes at least {floor * 1e3:.2f} ms "
        f"(bandwidth of the memory alone), so {tpu} makes at most {ceiling:,.0f} tokens/s with {num_slots} slots"
        f"{'' if is_spread else ' a chip'}"
    )
    yield f"{len(results)} of the server's {traced.num_graphs} graphs compiled; no figure was measured on a TPU"


def fits(tpu: Tpu, traced: Traced, results: Mapping[str, Compiled | str]) -> bool:
    """Whether every graph compiles and all of it has room in a chip's memory."""
    memory = memory_of(traced, results, tpu.chip)
    return memory is not None and memory.left >= 0


def graph_row(name: str, result: Compiled | str, traced: Traced) -> tuple[str, ...]:
    """What the compiler says of one graph; dashes where it refuses."""
    if isinstance(result, str):
        return (name, *["-"] * (len(GRAPH_COLUMNS) - 1))
    return (
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


def collective_rows(results: Mapping[str, Compiled | str]) -> Iterator[tuple[str, ...]]:
    """One row for each kind of exchange of each graph."""
    for name, result in results.items():
        if isinstance(result, Compiled):
            for kind, number in result.num_collectives.items():
                yield name, kind, str(number), f"{result.collective_bytes[kind] / 1e6:,.3f}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as what is in them: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3f}"
