"""Bars for compiled graphs: what `make tpu-check` holds the model code to.

Two figures of a decode step, both without a unit. *Memory*: arguments, output and temporary memory, less what is
written over an argument, over the bytes of weights and cache. *Traffic*: bytes accessed over `yardstick_bytes`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpu_tgi_server.plan.messages import REFERENCE, Compiled, Traced

MAX_MEMORY_RATIO = 1.10
MAX_TRAFFIC_RATIO = 1.25
MAX_COLLECTIVES_A_LAYER = 4
MAX_COLLECTIVES_A_STEP = 4


@dataclass(frozen=True)
class Finding:
    """One graph, what was looked at, what was found, and whether that is good."""

    graph: str
    what: str
    is_good: bool


def memory_ratio(compiled: Compiled, traced: Traced) -> float:
    """1 is a step that needs no memory of its own."""
    return compiled.memory_bytes / (traced.weights_bytes + traced.cache_bytes)


def yardstick_bytes(reference: Compiled, traced: Traced) -> float:
    """The bytes that a decode step need not exceed: those of the reference graph, or fewer if that is wasteful itself.

    The compiler counts what is carried into on-chip memory twice, as it is written there and read again: so weights and
    cache, each carried once, are twice their size.
    """
    return min(reference.accessed_bytes, 2.0 * (traced.streamed_bytes + traced.cache_bytes))


def findings(traced: Traced, results: Mapping[str, Compiled | str]) -> Iterator[Finding]:
    """Everything that the bars say about the graphs of one model; traffic only where there is a reference graph."""
    reference = results.get(REFERENCE)
    for graph, compiled in results.items():
        if isinstance(compiled, str):
            yield Finding(graph, f"does not compile: {compiled}", is_good=False)
            continue
        yield Finding(graph, f"compiles in {compiled.compile_s:.1f} s", is_good=True)
        if graph == REFERENCE:
            continue
        yield Finding(
            graph,
            f"{compiled.num_aliased} of {traced.num_cache_buffers} cache buffers updated in place",
            compiled.num_aliased >= traced.num_cache_buffers,
        )
        yield Finding(graph, f"{compiled.num_cache_copies} copies of the cache", compiled.num_cache_copies == 0)
        if traced.num_cores > 1:
            yield collective_finding(graph, compiled, traced)
        if graph.startswith("decode"):
            memory = memory_ratio(compiled, traced)
            what = f"memory {memory:.3f} of weights and cache (bar {MAX_MEMORY_RATIO})"
            yield Finding(graph, what, memory <= MAX_MEMORY_RATIO)
            if isinstance(reference, Compiled):
                yield traffic_finding(graph, compiled, reference, traced)


def traffic_finding(graph: str, compiled: Compiled, reference: Compiled, traced: Traced) -> Finding:
    yardstick = yardstick_bytes(reference, traced)
    traffic = compiled.accessed_bytes / yardstick
    what = f"traffic {traffic:.3f} of {yardstick / 1e9:.2f} GB, reference {reference.accessed_bytes / 1e9:.2f} GB"
    return Finding(graph, f"{what} (bar {MAX_TRAFFIC_RATIO})", traffic <= MAX_TRAFFIC_RATIO)


def collective_finding(graph: str, compiled: Compiled, traced: Traced) -> Finding:
    """A layer's two sums and the exchange of its new keys and values, and few more a step."""
    num_layers = traced.num_cache_buffers // 2
    counts = ", ".join(
        f"{number} {kind} ({compiled.collective_bytes[kind] / 1e6:.2f} MB)"
        for kind, number in compiled.num_collectives.items()
    )
    most = MAX_COLLECTIVES_A_LAYER * num_layers + MAX_COLLECTIVES_A_STEP
    return Finding(graph, f"{counts} (bar {most} in all)", sum(compiled.num_collectives.values()) <= most)
