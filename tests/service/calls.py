"""Calls to a server that follows a script."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.driver import Driver, new_request
from tests.scripted import Faults
from tests.servers import (
    ServerProcess,
    ready_server,
    start_scripted_server,
)
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

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
