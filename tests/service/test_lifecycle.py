"""The life of the server's processes: real processes, real signals, and nothing left behind."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.driver import Driver, new_request
from tests.scripted import Faults
from tests.servers import (
    START_TIMEOUT_S,
    ServerProcess,
    ready_server,
    start_model_server,
    start_scripted_server,
    start_server,
    wait_for,
)
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.service.lifecycle import clear_way

LONG_S = 60.0


def prefill_one(stub: Any, batch_id: int = 1, num_requests: int = 1, new: int = 9) -> pb.CachedBatch:
    first = batch_id * 100
    requests = [new_request(first + number, "a prompt", new=new) for number in range(num_requests)]
    batch = Driver(stub).prefill(batch_id, *requests)
    assert batch is not None
    return batch


@contextmanager
def serving(folder: Path, faults: Faults, **settings: Any) -> Iterator[tuple[ServerProcess, Any]]:
    """A server that is ready and ends well, and a stub."""
    with ready_server(start_scripted_server(folder, faults, **settings)) as server, server.connect() as stub:
        yield server, stub


@contextmanager
def decoding(folder: Path, faults: Faults) -> Iterator[tuple[ServerProcess, Any, Any]]:
    """A server in the middle of a Decode: the server, a stub, and the call's future."""
    with start_scripted_server(folder, faults, step_ahead=False) as server:  # or its log would not tell of the call
        server.wait_for_socket()
        with server.connect() as stub:
            batch = prefill_one(stub)
            call = stub.Decode.future(pb.DecodeRequest(batches=[batch]))
            server.wait_for_log("decode begins")
            yield server, stub, call


def error_of(call: Any, timeout_s: float) -> Any:
    """The error that a call ends with in time."""
    error = call.exception(timeout_s)
    assert error is not None
    return error


def assert_health_fails(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        stub.Health(pb.HealthRequest(), timeout=5)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE


def test_killed_agent_fails_its_calls_and_is_replaced(tmp_path: Path) -> None:
    """Health tells the truth meanwhile, and the process stays."""
    with decoding(tmp_path, Faults(decode_s=LONG_S, load_s=1.0)) as (server, stub, call):
        server.agent().kill()
        error = error_of(call, timeout_s=5)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "signal 9" in error.details()
        assert_health_fails(stub)
        server.wait_for_log("the model is loaded again")
        stub.Health(pb.HealthRequest(), timeout=5)
        prefill_one(stub)
        assert server.process.poll() is None


def test_agent_that_dies_between_calls_is_replaced(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults()) as server:
        server.wait_for_socket()
        with server.connect() as stub:
            prefill_one(stub)
            server.agent().kill()
            server.wait_for_log("the model is loaded again")
            prefill_one(stub)


def test_agents_that_die_one_after_the_other_end_the_server_with_the_reason(tmp_path: Path) -> None:
    with decoding(tmp_path, Faults(decode_error="the device is on fire")) as (server, stub, call):
        for number in range(1, 4):
            error = error_of(call, timeout_s=10)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert re.fullmatch(r"Decode failed: RuntimeError in scripted\.py:\d+ on_step", error.details())
            if number < 3:
                wait_for(lambda: server.log.read_text().count("loaded again") == number, 60, "another agent")  # noqa: B023
                call = stub.Decode.future(pb.DecodeRequest(batches=[prefill_one(stub)]))
        assert server.wait_until_gone(10) == 1
        assert_health_fails(stub)
        assert not server.socket.exists()
        records = server.records()
        tracebacks = [record for record in records if "\nRuntimeError" in record["text"]]
        assert [record["record"]["level"]["name"] for record in tracebacks] == ["ERROR"] * 3
        assert all("scripted.py" in record["text"] for record in tracebacks)
        assert "the device is on fire" not in server.log.read_text() + server.errors.read_text()
        assert "3 agents have died in a row" in records[-1]["text"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_while_decoding(tmp_path: Path, number: signal.Signals) -> None:
    with decoding(tmp_path, Faults(decode_s=LONG_S)) as (server, _, call):
        server.process.send_signal(number)
        assert server.wait_until_gone(10) == 0
        assert error_of(call, timeout_s=1).code() is grpc.StatusCode.UNAVAILABLE
        assert not server.socket.exists()


def test_second_sigterm_does_no_harm(tmp_path: Path) -> None:
    with decoding(tmp_path, Faults(decode_s=LONG_S)) as (server, _, _call):
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0
        assert "Traceback" not in server.log.read_text() + server.errors.read_text()


def test_sigterm_while_loading(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(load_s=LONG_S)) as server:
        server.wait_for_log("loading: script")
        assert not server.socket.exists()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0
        assert "Traceback" not in server.log.read_text() + server.errors.read_text()


def test_sigterm_at_the_very_start(tmp_path: Path) -> None:
    """The agent has not even imported its modules."""
    with start_scripted_server(tmp_path, Faults()) as server:
        server.agent()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0


def test_sigterm_while_warming_up(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(warm_up_s=LONG_S)) as server:
        server.wait_for_socket()
        with server.connect() as stub:
            call = stub.Warmup.future(pb.WarmupRequest())
            server.wait_for_log("warm_up begins")
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_until_gone(10) == 0
            assert error_of(call, timeout_s=1).code() is grpc.StatusCode.UNAVAILABLE
        assert not server.socket.exists()


def test_sigterm_while_xla_compiles(tmp_path: Path, tiny_model_folder: Path) -> None:
    with start_model_server(tmp_path, tiny_model_folder, "--device", "xla-cpu") as server:
        server.wait_for_socket()
        with server.connect() as stub:
            call = stub.Warmup.future(pb.WarmupRequest())
            server.wait_for_log("warming up: prefill 16 greedy (1/")
            server.process.send_signal(signal.SIGTERM)
            assert server.wait_until_gone(10) == 0
            assert error_of(call, timeout_s=1).code() is grpc.StatusCode.UNAVAILABLE
        assert not server.socket.exists()


def test_loading_agent_does_not_outlive_a_killed_root(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(load_s=LONG_S)) as server:
        server.wait_for_log("loading: script")
        server.process.kill()
        assert server.wait_until_gone(5) == -signal.SIGKILL


def test_decoding_agent_does_not_outlive_a_killed_root(tmp_path: Path) -> None:
    with decoding(tmp_path, Faults(decode_s=LONG_S)) as (server, _, call):
        server.process.kill()
        assert server.wait_until_gone(5) == -signal.SIGKILL
        assert error_of(call, timeout_s=1).code() is grpc.StatusCode.UNAVAILABLE


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


def test_loading_failure_is_one_clear_line(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(load_error="the weights are made of cheese")) as server:
        assert server.wait_until_gone(60) == 1
        errors = [record["text"] for record in server.records() if record["record"]["level"]["no"] >= 40]
        assert errors == ["could not start: the weights are made of cheese"]
        assert server.errors.read_text() == ""


def test_agent_that_is_killed_while_it_loads_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(load_s=LONG_S)) as server:
        server.wait_for_log("loading: script")
        server.agent().kill()
        assert server.wait_until_gone(10) == 1
        assert server.records()[-1]["text"] == "could not start: the agent was ended by signal 9"
        assert server.errors.read_text() == ""
        assert not server.socket.exists()


def test_sigterm_while_the_model_is_loaded_again(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(load_s=3.0)) as server:
        server.wait_for_socket()
        server.agent().kill()
        server.wait_for_log("loading the model again")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0
        assert not server.socket.exists()
        assert server.errors.read_text() == ""


def test_stopped_agent_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with decoding(tmp_path, Faults(decode_s=LONG_S)) as (server, _, call):
        server.agent().suspend()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0
        assert error_of(call, timeout_s=1).code() is grpc.StatusCode.UNAVAILABLE
        assert server.errors.read_text() == ""


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    stale_socket(tmp_path)
    with ready_server(start_scripted_server(tmp_path, Faults(load_s=0.5))) as server:
        wait_for(lambda: "serving on" in server.log.read_text(), 60, "the server")
        with server.connect() as stub:
            stub.Health(pb.HealthRequest())


def test_second_server_on_the_same_path_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with ready_server(start_scripted_server(tmp_path, Faults())) as first:
        folder = tmp_path / "second"
        folder.mkdir()
        (folder / "uds-0").symlink_to(first.socket)
        with start_scripted_server(folder, Faults()) as second:
            assert second.wait_until_gone(20) == 1
            assert "another server is listening" in second.log.read_text() + second.errors.read_text()
        with first.connect() as stub:
            stub.Health(pb.HealthRequest())


def test_server_that_is_ready_first_keeps_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "uds-0").symlink_to(tmp_path / "uds-0")
    with start_scripted_server(folder, Faults(load_s=6)) as slow:
        slow.agent()
        with ready_server(start_scripted_server(tmp_path, Faults())) as first:
            assert slow.wait_until_gone(60) == 1
            assert "another server is listening" in slow.log.read_text() + slow.errors.read_text()
            with first.connect() as stub:
                stub.Health(pb.HealthRequest())


def test_path_that_cannot_be_listened_on_is_one_clear_line(tmp_path: Path) -> None:
    with start_server(tmp_path, ["-m", "tests.scripted_server", "/proc/uds", "{}"]) as server:
        assert server.wait_until_gone(60) == 1
        assert "cannot listen on /proc/uds-0" in server.log.read_text() + server.errors.read_text()


def test_server_started_without_standard_streams_serves_and_keeps_their_numbers_free(tmp_path: Path) -> None:
    """Or libraries that write to them would write into the connection to the agent."""
    code = "import os, sys; [os.close(n) for n in (0, 1, 2)]; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = ["-c", code, "-m", "tests.scripted_server", str(tmp_path / "uds"), "{}"]
    with start_server(tmp_path, command) as server:
        wait_for(server.socket.exists, START_TIMEOUT_S, "the socket")
        with server.connect() as stub:
            prefill_one(stub)
        for process in (server.pid, server.agent().pid):
            assert {os.readlink(f"/proc/{process}/fd/{number}") for number in (0, 1, 2)} == {"/dev/null"}
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0


def test_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file is not a folder: choose another --uds-path"):
        clear_way(tmp_path / "file" / "uds-0")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), PermissionError(1, "Not permitted")])
@pytest.mark.parametrize("call", ["os.stat", "socket.socket.connect", "os.unlink"])
def test_socket_of_another_user_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: OSError
) -> None:
    """Root may do everything, so the operating system's refusal is played."""
    path = stale_socket(tmp_path)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(call, refuse)
        with pytest.raises(ValueError, match="choose another --uds-path") as refusal:
            clear_way(path)
    assert str(error.strerror) in str(refusal.value)
    assert path.is_socket()


def test_folder_without_permission_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be written to: choose another --uds-path"):
        clear_way(tmp_path / "uds-0")


def test_socket_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "uds-0"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(ValueError, match="choose another --uds-path"):
            clear_way(path)
    assert path.is_socket()


def test_listener_that_accepts_nobody_is_a_server_too(tmp_path: Path) -> None:
    path = tmp_path / "uds-0"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as callers:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(5):
            caller = callers.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with suppress(BlockingIOError):
                caller.connect(str(path))
        with pytest.raises(ValueError, match="another server is listening"):
            clear_way(path)
    assert path.is_socket()


def test_leftover_socket_is_removed(tmp_path: Path) -> None:
    path = stale_socket(tmp_path)
    clear_way(path)
    assert not path.exists()
    clear_way(path)


def stale_socket(folder: Path) -> Path:
    """The file of a socket whose server is gone."""
    path = folder / "uds-0"
    with socket.socket(socket.AF_UNIX) as leftover:
        leftover.bind(str(path))
    assert path.is_socket()
    return path


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
