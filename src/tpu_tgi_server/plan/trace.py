"""The process that traces: `python -m tpu_tgi_server.plan.trace`, a TraceRequest as JSON on its standard input.

It writes one module a graph and prints a `Traced` as JSON. It runs the server's own `ModelRunner`, on a runtime that
writes down what it would compile.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path

import torch
from loguru import logger
from transformers import PreTrainedModel

from tpu_tgi_server.config import Dtype, Settings
from tpu_tgi_server.engine.loading import cache_sizes, resolve_limits, runner_limits
from tpu_tgi_server.model import buckets, loading
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.cache import StaticCacheXla
from tpu_tgi_server.model.interface import Graph
from tpu_tgi_server.model.probe import layers_to_serve
from tpu_tgi_server.model.runner import ModelRunner
from tpu_tgi_server.plan.hollow import hollow_model
from tpu_tgi_server.plan.messages import REFERENCE, Traced, TraceRequest
from tpu_tgi_server.plan.reference import ReferenceStep
from tpu_tgi_server.runtime.tracing import TracingRuntime


def trace(request: TraceRequest) -> Traced:
    """Trace the graphs that the request names.

    Raises:
        OSError, ValueError: the model's config cannot be read, the model cannot be served, or the sizes do not fit it.
        RuntimeError: a step cannot be traced.
    """
    runtime = TracingRuntime()
    folder = Path(request.folder)
    config = load_config(folder, request.trust_remote_code)
    layers = layers_to_serve(*find_model_class(config, folder, request.trust_remote_code), folder)
    sizes = Settings(
        request.folder,
        max_batch_size=request.num_slots,
        max_input_tokens=request.max_input_tokens,
        max_total_tokens=request.max_total_tokens,
    )
    limits = resolve_limits(sizes, config.get_text_config())
    dtype = loading.DTYPES.get(Dtype(request.dtype), runtime.default_dtype)
    model = hollow_model(folder, dtype, runtime, request.trust_remote_code)
    cache = loading.allocate_cache(layers, cache_sizes(sizes, limits), dtype, runtime)
    steps = loading.make_steps(model, cache, sizes.watermark_delta, runtime)
    sizes_of_graphs = runner_limits(sizes.prefill_chunk_tokens, limits)
    runner = ModelRunner(runtime, steps, sizes_of_graphs)
    graphs = buckets.graphs(*astuple(sizes_of_graphs))
    steps_by_name: dict[str, Callable[[], object]] = {
        str(graph): lambda graph=graph: runner.run_once(graph)  # type: ignore[misc]
        for graph in (largest_of_each_kind(graphs) if request.largest_only else graphs)
    }
    if REFERENCE in request.graphs:
        reference, tokens = ReferenceStep(model, cache), torch.zeros(2, limits.num_slots, dtype=torch.int32)
        traced_reference = runtime.prepare(reference.decode, [])
        steps_by_name[REFERENCE] = lambda: traced_reference(runtime.to_device(tokens), limits.max_total_tokens)
    modules = {}
    for name in request.graphs or steps_by_name:
        steps_by_name[name]()
        path = Path(request.target) / f"{name.replace(' ', '-')}.pb"
        path.write_bytes(runtime.module)
        modules[name] = str(path)
    tensors = [*cache.keys, *cache.values]
    return Traced(
        modules=modules,
        num_graphs=len(graphs),
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        dtype=str(dtype).removeprefix("torch."),
        weights_bytes=num_weight_bytes(model),
        streamed_bytes=num_weight_bytes(model) - num_looked_up_bytes(model),
        cache_bytes=num_cache_bytes(cache),
        cache_sizes=sorted({tensor.numel() for tensor in tensors}),
        num_cache_buffers=len(tensors),
    )


def largest_of_each_kind(graphs: tuple[Graph, ...]) -> list[Graph]:
    """The graphs that need the most memory: those of the largest size."""
    largest: dict[tuple[str, bool], Graph] = {}
    for graph in sorted(graphs, key=lambda graph: graph.size):
        largest[graph.kind, graph.has_sampler] = graph
    return sorted(largest.values(), key=lambda graph: (graph.has_sampler, graph.kind))


def num_weight_bytes(model: PreTrainedModel) -> int:
    """Parameters and buffers, tied ones once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def num_looked_up_bytes(model: PreTrainedModel) -> int:
    """The embedding table, unless the output layer shares it and so reads it whole."""
    table = model.get_input_embeddings().weight
    return 0 if table is model.get_output_embeddings().weight else int(table.nbytes)


def num_cache_bytes(cache: StaticCacheXla) -> int:
    return sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))


def main() -> int:
    """Answer one request. Errors that a user can act on are one line."""
    logger.remove()
    request = TraceRequest(**json.load(sys.stdin))
    try:
        traced = trace(request)
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps(asdict(traced)), flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # XLA's threads have nothing to finish
