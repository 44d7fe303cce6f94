"""Two replicas of a real model: what comes out is what one would say, also when one of them is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.driver import NEUTRAL, Driver, new_request
from tests.reference import greedy_reference, prompt_of_len
from tests.router import Entry, Router, RouterLimits
from tests.servers import ServerProcess, ready_server, start_model_server, wait_for
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.pb.v3 import generate_pb2 as pb_v3
from tpu_tgi_server.pb.v3 import generate_pb2_grpc as grpc_v3

NEW = 24
SIZES = ["--max-total-tokens", "128", "--max-input-tokens", "64"]
SAMPLED = {**NEUTRAL, "do_sample": True, "temperature": 1.2, "top_k": 40, "seed": 7}
GRAMMAR = {**NEUTRAL, "grammar": "[a-z ]{20}", "grammar_type": pb.GRAMMAR_TYPE_REGEX}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[ServerProcess]:
    options = ["--device", "cpu", "--replicas", "2", "--max-batch-size", "8", *SIZES]
    with ready_server(start_model_server(tmp_path_factory.mktemp("two"), tiny_model_folder, *options)) as server:
        yield server


def agents(server: ServerProcess) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.pid).children() if "spawn_main" in " ".join(child.cmdline())]


def kill_one(server: ServerProcess, number: int) -> None:
    os.kill(agents(server)[number].pid, signal.SIGKILL)


def wait_for_both(server: ServerProcess, num_deaths: int) -> None:
    wait_for(lambda: server.log.read_text().count("the model is loaded again") == num_deaths, 60, "the other replica")


def test_answers_are_those_of_one_model_also_when_a_replica_is_killed_under_load(
    server: ServerProcess, tiny_model_folder: Path
) -> None:
    """Greedy answers are compared with transformers, the others with the same requests undisturbed."""
    prompts = [prompt_of_len(num_tokens) for num_tokens in range(5, 17)]
    num_deaths = server.log.read_text().count("the model is loaded again")
    with server.connect() as stub:
        special: dict[int, dict[str, Any]] = {
            100: SAMPLED,
            101: GRAMMAR,
            102: {**SAMPLED, "repetition_penalty": 1.3, "watermark": True},
        }

        def requests(first: int) -> list[Any]:
            greedy = [new_request(first + number, prompt, new=NEW) for number, prompt in enumerate(prompts)]
            fields: Any = {"new": NEW, "top_n_tokens": 2, "prefill_logprobs": True}
            others = [new_request(first + id, prompts[0], parameters=given, **fields) for id, given in special.items()]
            return greedy + others

        undisturbed = Driver(stub).run(1, *requests(0))
        driver = Driver(stub)
        live = driver.prefill(2, *requests(1000))
        for step in range(4 * NEW):
            if step == 9:
                kill_one(server, 0)
            if live is None:
                break
            live = driver.decode(live)
            stub.Health(pb.HealthRequest(), timeout=5)
        driver.drain(live)
        assert server.process.poll() is None
        answers = [driver.answers[request.id] for request in requests(1000)]
        for prompt, answer in zip(prompts, answers, strict=False):
            assert tuple(answer.ids) == greedy_reference(tiny_model_folder, prompt).ids
        for answer, before in zip(answers, undisturbed, strict=True):
            assert answer.ids == before.ids
            assert answer.texts == before.texts
            assert answer.end == before.end
            assert answer.logprobs == pytest.approx(before.logprobs, abs=1e-4)
            assert len(answer.top_tokens) == len(before.top_tokens)
            assert (answer.prefill_tokens is None) == (before.prefill_tokens is None)
        wait_for_both(server, num_deaths + 1)


def test_router_serves_on_while_replicas_die(server: ServerProcess, tiny_model_folder: Path) -> None:
    import grpc

    num_deaths = server.log.read_text().count("the model is loaded again")
    limits = RouterLimits(max_input_tokens=64, max_total_tokens=128, max_batch_prefill_tokens=512, max_batch_size=8)
    with grpc.insecure_channel(f"unix:{server.socket}") as channel:
        router = Router(grpc_v3.TextGenerationServiceStub(channel), pb_v3, limits)
        router.start()
        entries: list[Entry] = []
        steps = 0

        def on_step() -> None:
            nonlocal steps
            steps += 1
            if steps == 20:
                kill_one(server, 1)
            if len(entries) < 40 and router.num_in_flight < 12:
                num_tokens = 5 + len(entries) % 12
                patience = 7 if len(entries) % 9 == 8 else None
                entries.append(router.submit(prompt_of_len(num_tokens), num_tokens, patience, new=NEW))

        router.on_step = on_step
        router.run()
        wait_for_both(server, num_deaths + 1)
        router.check_health(with_prefill=True)
    failed = [entry for entry in entries if entry.error is not None]
    assert len(failed) <= 8, "more than the Prefill in flight has failed"
    assert all("signal 9" in str(entry.error) for entry in failed)
    for entry in entries:
        if entry.error is None and entry.patience is None:
            assert tuple(entry.answer.ids) == greedy_reference(tiny_model_folder, entry.request.inputs).ids


def test_warm_up_reports_the_slots_of_all(server: ServerProcess) -> None:
    with server.connect() as stub:
        response = stub.Warmup(pb.WarmupRequest(max_input_length=64, max_total_tokens=128))
    assert response.max_supported_total_tokens == 8 * 128
