"""Signals end the server from whatever it is doing, and nothing is left behind."""

import signal
from pathlib import Path

import grpc
import pytest

from tests.scripted import Faults
from tests.servers import (
    ServerProcess,
    start_model_server,
    start_scripted_server,
)
from tests.service.calls import LONG_S, decoding, error_of
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


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
        end_in_warm_up(server, "warm_up begins")


def test_sigterm_while_xla_compiles(tmp_path: Path, tiny_model_folder: Path) -> None:
    with start_model_server(tmp_path, tiny_model_folder, "--device", "xla-cpu") as server:
        end_in_warm_up(server, "warming up: prefill 16 greedy (1/")


def end_in_warm_up(server: ServerProcess, log_text: str) -> None:
    """SIGTERM when the log of a Warmup has a text: the call gets an error, and nothing is left."""
    server.wait_for_socket()
    with server.connect() as stub:
        call = stub.Warmup.future(pb.WarmupRequest())
        server.wait_for_log(log_text)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0
        assert error_of(call, timeout_s=1).code() is grpc.StatusCode.UNAVAILABLE
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
