"""What XLA itself counts: graphs, executions, transfers and donated buffers, on `xla-cpu` with a tiny random model.

    python -m bench.graphs

Prints one JSON object, see `Facts`. It runs in a process of its own, as PJRT devices are a choice of the process.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.bars import Bar
from tests.driver import Driver, GeneratorStub, new_request
from tests.tiny_model import NUM_LAYERS, save_tiny_model
from tests.xla_facts import MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS, aliased_buffers, send_random_requests
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.interface import Graph
from tpu_tgi_server.runtime.interface import Runtime
from tpu_tgi_server.runtime.select import select_runtime

NUM_SLOTS = 4
NUM_STEPS = 10
NUM_REQUESTS = 100


@dataclass(frozen=True)
class Facts:
    """Counts of one process.

    Attributes:
        num_listed: prefill buckets plus decode windows.
        num_compiled: by warm-up.
        num_donated: buffers that a greedy decode graph updates in place.
        executions, to_device, from_device, fallbacks: of one decode step, on average.
        num_compiled_later: by random requests after warm-up.
    """

    num_listed: int
    num_compiled: int
    num_donated: int
    executions: float
    to_device: float
    from_device: float
    fallbacks: float
    num_compiled_later: int


def measure_graphs() -> list[Bar]:
    """The facts of another process, as bars."""
    done = subprocess.run([sys.executable, "-m", "bench.graphs"], stdout=subprocess.PIPE, text=True, check=True)
    facts = Facts(**json.loads(done.stdout.splitlines()[-1]))
    name = f"xla-cpu, {NUM_SLOTS} slots:"
    return [
        Bar(f"{name} graphs of warm-up", facts.num_compiled, 2 * facts.num_listed, "=", note="2 (buckets + windows)"),
        Bar(f"{name} executions a decode step", facts.executions, 1, "="),
        Bar(f"{name} transfers to the device a step", facts.to_device, 2, "<="),
        Bar(f"{name} transfers to the host a step", facts.from_device, 2, "<="),
        Bar(f"{name} donated buffers", facts.num_donated, 2 * NUM_LAYERS, "=", note=f"{NUM_LAYERS} layers"),
        Bar(f"{name} host operators a step", facts.fallbacks, 0, "="),
        Bar(f"{name} compilations after warm-up", facts.num_compiled_later, 0, "=", note=f"{NUM_REQUESTS} requests"),
    ]


def count(name: str) -> int:
    """How often a metric of torch_xla has been recorded."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data(name)
    return 0 if data is None else int(data[0])


def count_fallbacks() -> int:
    """Operators that torch_xla could not lower and ran on the host."""
    import torch_xla.debug.metrics as metrics

    names = (name for name in metrics.counter_names() if name.startswith("aten::"))
    return sum(metrics.counter_value(name) or 0 for name in names)


def collect(runtime: Runtime, folder: Path) -> Facts:
    sizes = {
        "max_batch_size": NUM_SLOTS,
        "max_total_tokens": MAX_TOTAL_TOKENS,
        "max_input_tokens": MAX_INPUT_TOKENS,
    }
    settings = Settings(str(folder), device=Device.XLA_CPU, **sizes)  # type: ignore[arg-type]
    generator, _ = load_generator(settings, runtime, lambda *_: None)
    donated: list[int] = []
    aliased = 0

    def on_graph(graph: Graph, number: int, total: int) -> None:  # noqa: ARG001
        nonlocal aliased
        before, aliased = aliased, aliased_buffers()
        if graph.kind == "decode" and not graph.has_sampler:
            donated.append(aliased - before)

    compiled = runtime.num_compilations()
    generator.warm_up(on_graph)
    num_compiled = runtime.num_compilations() - compiled
    driver = Driver(GeneratorStub(generator))
    running = driver.prefill(1, *[new_request(1000 + n, "the quick", new=NUM_STEPS + 2) for n in range(NUM_SLOTS)])
    before = step_counts()
    for _ in range(NUM_STEPS):
        assert running is not None
        running = driver.decode(running)
    steps = [(after - start) / NUM_STEPS for after, start in zip(step_counts(), before, strict=True)]
    generator.clear(None)
    compiled = runtime.num_compilations()
    send_random_requests(generator, NUM_REQUESTS)
    num_compiled_later = runtime.num_compilations() - compiled
    executions, to_device, from_device, fallbacks = steps
    return Facts(
        num_listed=len(buckets.prefill_buckets(MAX_INPUT_TOKENS)) + len(buckets.decode_buckets(MAX_TOTAL_TOKENS)),
        num_compiled=num_compiled,
        num_donated=min(donated),
        executions=executions,
        to_device=to_device,
        from_device=from_device,
        fallbacks=fallbacks,
        num_compiled_later=num_compiled_later,
    )


def step_counts() -> tuple[int, ...]:
    return count("ExecuteTime"), count("TransferToDeviceTime"), count("TransferFromDeviceTime"), count_fallbacks()


def run(_rank: int, runtime: Runtime) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder))
        print(json.dumps(asdict(collect(runtime, Path(folder)))))


if __name__ == "__main__":
    xla = select_runtime(Device.XLA_CPU)
    xla.launch(run, (xla,))
