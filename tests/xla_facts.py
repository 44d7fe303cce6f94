"""Facts about compiled graphs, found in a process of its own:

    python -m tests.xla_facts MODEL_FOLDER NUM_SLOTS NUM_REQUESTS PARALLEL

Prints one JSON object, see `Facts`.
"""

import itertools
import json
import random
import sys
from dataclasses import asdict, dataclass

from tests.driver import Driver, GeneratorStub, batch_of, new_request
from tests.parameters import random_request
from tests.reference import prompt_of_len
from tpu_tgi_server.config import Device, Parallel, Settings
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.model import buckets
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.runtime.interface import Runtime
from tpu_tgi_server.runtime.select import select_runtime

MAX_TOTAL_TOKENS = 256
MAX_INPUT_TOKENS = 32


@dataclass
class StepFacts:
    """What one decode step did."""

    num_executions: int
    num_uploads: int
    num_downloads: int
    num_host_operators: int


@dataclass
class Facts:
    """What one process has counted."""

    num_graphs: int
    num_compiled_while_loading: int
    num_compiled_by_warm_up: int
    num_aliased_buffers: int
    num_compiled_by_requests: int
    num_compiled_by_second_warm_up: int
    greedy_step: StepFacts
    sampled_step: StepFacts
    masked_step: StepFacts


def aliased_buffers() -> int:
    """How many buffers all graphs together update in place."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("InputOutputAliasCount")
    return 0 if data is None else int(data[1])


def step_facts(generator: Generator, *requests: pb.Request) -> StepFacts:
    """Those of the second decode of these requests."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    def counts() -> list[int]:
        xm.wait_device_ops()
        names = ("ExecuteTime", "ExecuteReplicatedTime", "TransferToDeviceTime", "TransferFromDeviceTime")
        data = [metrics.metric_data(name) for name in names]
        on_one, on_all, *transfers = [int(samples[0]) if samples else 0 for samples in data]
        return [on_one + on_all, *transfers]

    driver = Driver(GeneratorStub(generator))
    running = driver.decode(batch_of(driver.prefill(1, *requests)))
    before = counts()
    running = driver.decode(batch_of(running))
    executions, uploads, downloads = (after - before for before, after in zip(before, counts(), strict=True))
    driver.clear()
    return StepFacts(executions, uploads, downloads, len(metrics.executed_fallback_ops()))


def collect(runtime: Runtime, folder: str, num_slots: int, num_requests: int) -> Facts:
    settings = Settings(
        folder,
        device=Device.XLA_CPU,
        max_batch_size=num_slots,
        max_total_tokens=MAX_TOTAL_TOKENS,
        max_input_tokens=MAX_INPUT_TOKENS,
    )
    counts = [runtime.num_compilations()]
    generator, _ = load_generator(settings, runtime, lambda *_: None)
    counts.append(runtime.num_compilations())
    generator.warm_up(lambda *_: None)
    counts.append(runtime.num_compilations())
    num_aliased = aliased_buffers()
    send_random_requests(generator, num_requests)
    counts.append(runtime.num_compilations())
    generator.warm_up(lambda *_: None)
    counts.append(runtime.num_compilations())
    loading, warm_up, requests, second = (after - before for before, after in itertools.pairwise(counts))
    return Facts(
        num_graphs=len(buckets.graphs(MAX_INPUT_TOKENS, MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS)),
        num_compiled_while_loading=loading,
        num_compiled_by_warm_up=warm_up,
        num_aliased_buffers=num_aliased,
        num_compiled_by_requests=requests,
        num_compiled_by_second_warm_up=second,
        greedy_step=step_facts(generator, new_request(1, "a")),
        sampled_step=step_facts(generator, new_request(1, "a", parameters={"temperature": 0.5, "seed": 1})),
        masked_step=step_facts(
            generator,
            new_request(1, "a", parameters={"grammar": "[a-z]{50}", "grammar_type": pb.GRAMMAR_TYPE_REGEX}),
        ),
    )


def send_random_requests(generator: Generator, num_requests: int) -> None:
    """Batches of random sizes and lengths that join at random moments, lose members and are cleared."""
    chance = random.Random(0)
    driver = Driver(GeneratorStub(generator))
    running: pb.CachedBatch | None = None
    sent = 0
    while sent < num_requests or running is not None:
        batches = [running] if running else []
        if sent < num_requests and chance.random() < 0.5:
            size = min(chance.randint(1, 4), num_requests - sent)
            joining = driver.prefill(sent, *[any_request(chance, sent + number) for number in range(size)])
            sent += size
            batches += [joining] if joining else []
        if batches and chance.random() < 0.1:
            victim = batches.pop()
            kept = driver.filter(victim, list(victim.request_ids)[1:])
            batches += [kept] if kept else []
        running = driver.decode(*batches) if batches else None
    assert len(driver.answers) == num_requests


def any_request(chance: random.Random, number: int) -> pb.Request:
    if number % 50 == 49:
        return new_request(number, prompt_of_len(3), new=MAX_TOTAL_TOKENS)
    return random_request(chance, number, MAX_INPUT_TOKENS, max_new_tokens=12)


def run(_rank: int, runtime: Runtime, folder: str, num_slots: int, num_requests: int) -> None:
    print(json.dumps(asdict(collect(runtime, folder, num_slots, num_requests))))


def main(folder: str, num_slots: str, num_requests: str, parallel: str) -> None:
    runtime = select_runtime(Device.XLA_CPU, parallel=Parallel(parallel))
    runtime.launch(run, (runtime, folder, int(num_slots), int(num_requests)))


if __name__ == "__main__":
    main(*sys.argv[1:])
