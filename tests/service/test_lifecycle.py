"""A server while it serves: calls beside each other, calls that are given up, and its log."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.driver import Driver, new_request
from tests.scripted import Faults
from tests.servers import (
    ready_server,
    start_scripted_server,
    wait_for,
)
from tests.service.calls import prefill_one, serving
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


def test_health_answers_at_once_while_the_agent_is_busy(tmp_path: Path) -> None:
    with serving(tmp_path, Faults(decode_s=1.0, warm_up_s=0.5)) as (server, stub):
        warm_up = stub.Warmup.future(pb.WarmupRequest())
        server.wait_for_log("warm_up begins")
        assert_health_is_fast(stub, warm_up)
        batch = prefill_one(stub)
        decode = stub.Decode.future(pb.DecodeRequest(batches=[batch]))
        server.wait_for_log("decode begins")
        assert_health_is_fast(stub, decode)


def assert_health_is_fast(stub: Any, busy: Any) -> None:
    for _ in range(20):
        started = time.perf_counter()
        stub.Health(pb.HealthRequest())
        assert time.perf_counter() - started < 0.1
    assert not busy.done(), "the server was not busy meanwhile"
    busy.result()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_cancelled_call_frees_its_slots(tmp_path: Path, kind: str) -> None:
    faults = Faults(prefill_s=0.5) if kind == "prefill" else Faults(decode_s=0.5)
    with serving(tmp_path, faults, step_ahead=False) as (server, stub):  # so that only a Decode logs "decode begins"
        if kind == "prefill":
            requests = [new_request(id, "cancelled", new=9) for id in range(4)]
            batch = pb.Batch(id=1, requests=requests, size=4)
            call = stub.Prefill.future(pb.PrefillRequest(batch=batch))
        else:
            first, second = prefill_one(stub, 1, 2), prefill_one(stub, 2, 2)
            call = stub.Decode.future(pb.DecodeRequest(batches=[first, second]))
        server.wait_for_log(f"{kind} begins")
        call.cancel()
        driver = Driver(stub)
        requests = [new_request(1000 + id, "next", new=2) for id in range(4)]
        wait_for(lambda: is_idle(stub), 5, "the cancelled batch to be cleared")
        driver.prefill(3, *requests)
        assert [len(driver.answers[request.id].ids) for request in requests] == [1, 1, 1, 1]


def is_idle(stub: Any) -> bool:
    """Whether no request is live: only then is Warmup done."""
    try:
        stub.Warmup(pb.WarmupRequest())
    except grpc.RpcError:
        return False
    return True


def test_ten_thousand_warnings_are_ten_thousand_records(tmp_path: Path) -> None:
    with serving(tmp_path, Faults(num_warnings_a_decode=5000)) as (server, stub):
        driver = Driver(stub)
        (answer,) = driver.run(1, new_request(1, "noisy", new=3))
        assert len(answer.ids) == 3
    records = server.records()
    warnings = [record for record in records if record["record"]["level"]["name"] == "WARNING"]
    assert len(warnings) == 10_000
    assert warnings[-1]["text"] == "warning 4999 with a line break\n and ünïcödé"
    assert server.errors.read_text() == ""


def test_clients_may_come_and_go_while_others_decode(tmp_path: Path) -> None:
    with ready_server(start_scripted_server(tmp_path, Faults())) as server:

        def answer(client: int) -> int:
            with server.connect() as stub:
                (answer,) = Driver(stub).run(client, new_request(client, f"client {client}", new=10))
                return len(answer.ids)

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(answer, range(8))) == [10] * 8


def test_root_loads_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """And an agent on plain torch loads no XLA."""
    with ready_server(start_scripted_server(tmp_path, Faults())) as server:
        root = mapped_libraries(psutil.Process(server.pid))
        agent = mapped_libraries(server.agent())
    assert not any("torch" in library for library in root)
    assert any("libtorch" in library for library in agent)
    assert not any("_XLAC" in library for library in agent)


def mapped_libraries(process: psutil.Process) -> list[str]:
    return [mapping.path for mapping in process.memory_maps()]
