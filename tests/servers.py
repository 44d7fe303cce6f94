"""Real servers in processes of their own, and what is left of them afterwards."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import psutil

from tests.scripted import Faults
from tpu_tgi_server.pb.v2 import generate_pb2_grpc

ROOT = Path(__file__).parent.parent
START_TIMEOUT_S = 120.0


@dataclass
class ServerProcess:
    """A server's root process, which leads a session that all its descendants stay in."""

    process: "subprocess.Popen[bytes]"
    socket: Path
    log: Path
    errors: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def agent(self) -> psutil.Process:
        """The agent's process, once it is there."""

        def find() -> psutil.Process | None:
            children = psutil.Process(self.pid).children()
            return next((child for child in children if "spawn_main" in " ".join(child.cmdline())), None)

        agent: psutil.Process = wait_for(find, 10, "an agent")
        return agent

    def survivors(self) -> list[psutil.Process]:
        """Processes of the server that still run."""
        return [process for process in psutil.process_iter() if _session(process) == self.pid and _runs(process)]

    def wait_for_socket(self) -> None:
        """Wait until the server says that it is ready."""
        wait_for(lambda: self.socket.exists() or self.process.poll() is not None, START_TIMEOUT_S, "the socket")
        assert self.process.poll() is None, self.log.read_text()

    def wait_for_log(self, text: str) -> None:
        """Wait until the log has a text."""
        wait_for(lambda: text in self.log.read_text() or self.process.poll() is not None, START_TIMEOUT_S, text)
        assert self.process.poll() is None, self.log.read_text()

    def records(self) -> list[dict[str, Any]]:
        """The log of a server with --json-output; fails if a line is not a record."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def wait_until_gone(self, timeout_s: float) -> int:
        """Wait for the end of all processes; the root's exit status."""
        deadline = time.monotonic() + timeout_s
        status = self.process.wait(timeout_s)
        left = deadline - time.monotonic()
        wait_for(lambda: not self.survivors(), left, lambda: f"the end of {self.survivors()}")
        return status

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """A stub on a connection of its own."""
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            yield generate_pb2_grpc.TextGenerationServiceStub(channel)


@contextmanager
def start_server(folder: Path, arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """Start a server with `python ARGUMENTS`; at the end it is killed if it still runs."""
    log = folder / "server.log"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    with (folder / "server.err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    log.touch()
    copier = threading.Thread(target=_copy, args=(process.stdout, log))
    copier.start()
    server = ServerProcess(process, Path(f"{folder / 'uds'}-0"), log, folder / "server.err")
    try:
        yield server
    finally:
        for survivor in server.survivors():
            survivor.kill()
        process.wait()
        copier.join()
        assert process.stdout is not None
        process.stdout.close()


def start_model_server(folder: Path, model: Path | str, *options: str) -> AbstractContextManager[ServerProcess]:
    """The real command with a real model."""
    command = ["-m", "tpu_tgi_server.cli", "--model-id", str(model), "--uds-path", str(folder / "uds"), *options]
    return start_server(folder, command)


def start_scripted_server(folder: Path, faults: Faults, **settings: Any) -> AbstractContextManager[ServerProcess]:
    """A server whose agent follows a script."""
    texts = (json.dumps(asdict(faults)), json.dumps(settings))
    return start_server(folder, ["-m", "tests.scripted_server", str(folder / "uds"), *texts])


@contextmanager
def ready_server(starting: AbstractContextManager[ServerProcess]) -> Iterator[ServerProcess]:
    """A started server that is ready, and that must end cleanly on SIGTERM."""
    with starting as server:
        server.wait_for_socket()
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_until_gone(10) == 0
        assert not server.socket.exists()


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> Any:
    """Poll until the condition holds.

    Raises:
        AssertionError: it did not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
    return result


def _copy(source: IO[bytes], target: Path) -> None:
    """Read a server's standard output through a pipe, as TGI's launcher does."""
    with target.open("wb", buffering=0) as log:
        while data := os.read(source.fileno(), 1 << 16):
            log.write(data)


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
