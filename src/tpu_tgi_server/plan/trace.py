"""The process that traces: `python -m tpu_tgi_server.plan.trace`, a TraceRequest as JSON on its standard input.

It writes one module a graph and prints a `Traced` as JSON. It runs the server's own `ModelRunner`, on a runtime that
writes down what it would compile.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from tpu_tgi_server.config import Dtype, Quantize, settings_from
from tpu_tgi_server.engine.loading import cache_sizes, resolve_limits, runner_limits
from tpu_tgi_server.model import buckets, loading
from tpu_tgi_server.model.architecture import load_config
from tpu_tgi_server.model.interface import Graph
from tpu_tgi_server.model.runner import ModelRunner
from tpu_tgi_server.model.sharding import bytes_a_core
from tpu_tgi_server.plan.hollow import hollow_model
from tpu_tgi_server.plan.messages import REFERENCE, Module, Traced, TraceRequest
from tpu_tgi_server.plan.reference import ReferenceStep
from tpu_tgi_server.runtime.tracing import LoweredStep, TracingRuntime


def trace(request: TraceRequest) -> Traced:
    """Trace the graphs that the request names.

    Raises:
        OSError, ValueError: the model's config cannot be read, the model cannot be served, or the sizes do not fit it.
        RuntimeError: a step cannot be traced.
    """
    runtime = TracingRuntime(request.num_cores)
    folder = Path(request.folder)
    config = load_config(folder, request.trust_remote_code)
    sizes = settings_from(
        {},
        model_id=request.folder,
        max_batch_size=request.num_slots,
        max_input_tokens=request.max_input_tokens,
        max_total_tokens=request.max_total_tokens,
        prefill_chunk_tokens=request.prefill_chunk_tokens,
    )
    limits = resolve_limits(sizes, config.get_text_config())
    dtype = loading.DTYPES.get(Dtype(request.dtype), runtime.default_dtype)
    quantize = Quantize(request.quantize) if request.quantize else None
    loaded = hollow_model(folder, dtype, runtime, request.trust_remote_code, quantize)
    model = loaded.module
    cache = loading.allocate_cache(loaded.layers, cache_sizes(sizes, limits), dtype, runtime)
    steps = loading.make_steps(model, cache, sizes.watermark_delta, runtime)
    sizes_of_graphs = runner_limits(sizes.prefill_chunk_tokens, limits)
    runner = ModelRunner(runtime, steps, sizes_of_graphs)
    graphs = buckets.graphs(*astuple(sizes_of_graphs))
    chosen = largest_of_each_kind(graphs) if request.largest_only else graphs
    steps_by_name: dict[str, Callable[[], object]] = {str(graph): partial(runner.run_once, graph) for graph in chosen}
    if REFERENCE in request.graphs:
        tokens = runtime.to_device(torch.zeros(2, limits.num_slots, dtype=torch.int32))
        reference = runtime.prepare(ReferenceStep(model, cache).decode, [])
        steps_by_name[REFERENCE] = partial(reference, tokens, limits.max_total_tokens)
    modules = {}
    for name in request.graphs or steps_by_name:
        steps_by_name[name]()
        modules[name] = save(runtime.lowered, Path(request.target) / f"{name.replace(' ', '-')}.pb")
    weights = [*model.parameters(), *model.buffers()]
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = [] if table is head else [table]  # a table that is shared is read whole by the output layer
    tensors = [*cache.keys, *cache.values]
    return Traced(
        modules=modules,
        num_graphs=len(graphs),
        num_cores=runtime.num_cores,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=num_bytes_a_core(weights, runtime),
        streamed_bytes=num_bytes_a_core(weights, runtime) - num_bytes_a_core(looked_up, runtime),
        cache_bytes=num_bytes_a_core(tensors, runtime),
        cache_sizes=sorted({num_bytes_a_core([tensor], runtime) // tensor.itemsize for tensor in tensors}),
        num_cache_buffers=len(tensors),
    )


def save(lowered: LoweredStep, path: Path) -> Module:
    """Write a module to a file."""
    path.write_bytes(lowered.module)
    return Module(str(path), lowered.donors, lowered.parameter_axes, lowered.result_axes)


def largest_of_each_kind(graphs: tuple[Graph, ...]) -> list[Graph]:
    """The graphs that need the most memory: those of the largest size."""
    largest: dict[tuple[str, bool], Graph] = {}
    for graph in sorted(graphs, key=lambda graph: graph.size):
        largest[graph.kind, graph.has_sampler] = graph
    return sorted(largest.values(), key=lambda graph: (graph.has_sampler, graph.kind))


def num_bytes_a_core(tensors: Sequence[Tensor], runtime: TracingRuntime) -> int:
    """What each core holds of them."""
    return sum(
        bytes_a_core(tensor.shape, tensor.itemsize, runtime.split_axis(tensor), runtime.num_cores) for tensor in tensors
    )


def main() -> int:
    """Answer one request. Errors that a user can act on are one line."""
    logger.remove()
    request = TraceRequest(**json.load(sys.stdin))
    try:
        traced = trace(request)
    except (OSError, ValueError, RuntimeError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps(asdict(traced)), flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # XLA's threads have nothing to finish
