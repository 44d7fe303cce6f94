"""Deaths of the agent and of the root: real processes, killed."""

import re
import signal
from pathlib import Path

import grpc

from tests.scripted import Faults
from tests.servers import (
    start_scripted_server,
    wait_for,
)
from tests.service.calls import LONG_S, assert_health_fails, decoding, error_of, prefill_one
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


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
