"""The path of the socket: who may listen there, and what may be in the way."""

import os
import signal
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.scripted import Faults
from tests.servers import (
    START_TIMEOUT_S,
    ready_server,
    start_scripted_server,
    start_server,
    wait_for,
)
from tests.service.calls import prefill_one
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.service.lifecycle import clear_way


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
