"""What XLA itself counts: graphs, executions, transfers and donated buffers, on `xla-cpu` with a tiny random model.

    python -m bench.xla_counts

Prints one JSON object: for each count its value, a relation, and its limit. It runs in a process of its own, as the
PJRT device is a choice of the process.
"""

import json
import tempfile
from pathlib import Path

from tests.driver import Driver, GeneratorStub, new_request
from tests.tiny_model import NUM_LAYERS, save_tiny_model
from tests.xla_facts import MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS, aliased_buffers, send_random_requests
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.interface import Graph
from tpu_tgi_server.runtime.interface import Runtime
from tpu_tgi_server.runtime.select import select_runtime

NUM_SLOTS = 4
NUM_STEPS = 10
NUM_REQUESTS = 100

Counts = dict[str, tuple[float, str, float]]


def collect(runtime: Runtime, folder: Path) -> Counts:
    """All counts, in the order in which a server meets them."""
    settings = Settings(
        str(folder),
        device=Device.XLA_CPU,
        max_batch_size=NUM_SLOTS,
        max_total_tokens=MAX_TOTAL_TOKENS,
        max_input_tokens=MAX_INPUT_TOKENS,
    )
    generator, _ = load_generator(settings, runtime, lambda *_: None)
    counts = count_warm_up(runtime, generator) | count_steps(generator)
    num_compiled = runtime.num_compilations()
    send_random_requests(generator, NUM_REQUESTS)
    num_compiled = runtime.num_compilations() - num_compiled
    return counts | {f"compilations by {NUM_REQUESTS} requests after warm-up": (num_compiled, "=", 0)}


def count_warm_up(runtime: Runtime, generator: Generator) -> Counts:
    """Graphs, and the buffers that a greedy decode graph updates in place: keys and values of each layer."""
    num_donated: list[int] = []
    num_aliased = 0

    def on_graph(graph: Graph, _number: int, _total: int) -> None:
        nonlocal num_aliased
        before, num_aliased = num_aliased, aliased_buffers()
        if graph.kind == "decode" and not graph.has_sampler:
            num_donated.append(num_aliased - before)

    num_compiled = runtime.num_compilations()
    generator.warm_up(on_graph)
    num_compiled = runtime.num_compilations() - num_compiled
    num_shapes = len(buckets.prefill_buckets(MAX_INPUT_TOKENS)) + len(buckets.decode_buckets(MAX_TOTAL_TOKENS))
    return {
        f"graphs of warm-up, {num_shapes} buckets and windows": (num_compiled, "=", 2 * num_shapes),
        "donated buffers": (min(num_donated), "=", 2 * NUM_LAYERS),
    }


def count_steps(generator: Generator) -> Counts:
    """What one greedy decode step takes, on average."""
    driver = Driver(GeneratorStub(generator))
    requests = [new_request(1000 + number, "the quick", new=NUM_STEPS + 2) for number in range(NUM_SLOTS)]
    running = driver.prefill(1, *requests)
    names = ("ExecuteTime", "TransferToDeviceTime", "TransferFromDeviceTime")
    before = [*map(num_recorded, names), num_fallbacks()]
    for _ in range(NUM_STEPS):
        assert running is not None
        running = driver.decode(running)
    after = [*map(num_recorded, names), num_fallbacks()]
    generator.clear(None)
    executions, to_device, from_device, fallbacks = (
        (last - first) / NUM_STEPS for first, last in zip(before, after, strict=True)
    )
    return {
        "executions a step": (executions, "=", 1),
        "transfers to the device a step": (to_device, "<=", 2),
        "transfers to the host a step": (from_device, "<=", 2),
        "operators on the host a step": (fallbacks, "=", 0),
    }


def num_recorded(metric: str) -> int:
    """How often torch_xla has recorded a metric."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data(metric)
    return 0 if data is None else int(data[0])


def num_fallbacks() -> int:
    """How many operators torch_xla could not lower and ran on the host."""
    import torch_xla.debug.metrics as metrics

    names = (name for name in metrics.counter_names() if name.startswith("aten::"))
    return sum(metrics.counter_value(name) or 0 for name in names)


def run(_rank: int, runtime: Runtime) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder))
        print(json.dumps(collect(runtime, Path(folder))))


if __name__ == "__main__":
    xla = select_runtime(Device.XLA_CPU)
    xla.launch(run, (xla,))
