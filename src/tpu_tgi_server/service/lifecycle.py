"""The life of the root process: start the agent, open the socket when it is ready, serve, leave nothing behind.

The socket is the readiness signal: TGI's launcher waits for its path to exist and starts the router at once.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_reflection.v1alpha import reflection
from loguru import logger

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.types import ModelInfo
from tpu_tgi_server.mailbox.choice import resolve_parallel
from tpu_tgi_server.mailbox.messages import Progress
from tpu_tgi_server.mailbox.process import AgentDiedError
from tpu_tgi_server.mailbox.root import DEFAULT_LOADER, RootMailbox
from tpu_tgi_server.service import v2, v3
from tpu_tgi_server.service.shard import Shard

MAX_MESSAGE_BYTES = 2**31 - 1
"""The largest limit that gRPC takes. Its default of 4 MiB refuses the warm-up of large prefill budgets."""

ResultT = TypeVar("ResultT")

LAST_WORDS_S = 1.0
"""How long calls in flight may take to deliver their errors when the agent has ended."""


async def serve(settings: Settings, on_progress: Callable[[Progress], None], loader: str = DEFAULT_LOADER) -> int:
    """Run until SIGTERM, SIGINT or SIGHUP (status 0) or until the agent dies (status 1)."""
    stop = _stop_on_signals()
    clear_way(settings.socket_path)
    mailbox: RootMailbox | None = None
    try:
        chosen = await _or_stopped(resolve_parallel(settings, os.environ, on_progress), stop)
        if chosen is None:
            return 0
        mailbox = RootMailbox(chosen, on_progress, loader)
        info = await _or_stopped(mailbox.start(), stop)
        return 0 if info is None else await _serve_until(stop, chosen, mailbox, info)
    except AgentDiedError as error:
        logger.error("could not start: {}", error)
    finally:
        if mailbox is not None:
            await mailbox.close()
    return 1


async def _or_stopped(work: Coroutine[Any, Any, ResultT], stop: "asyncio.Future[None]") -> ResultT | None:
    """The result of some work; None if the server is told to stop before it is there."""
    task = asyncio.create_task(work)
    await _first(task, stop)
    if not stop.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def _serve_until(stop: "asyncio.Future[None]", settings: Settings, mailbox: RootMailbox, info: ModelInfo) -> int:
    """Serve until told to stop (status 0) or until the mailbox has failed (status 1)."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
    )
    shard = Shard(settings, mailbox, info)
    for version in (v2, v3):
        version.add_to_server(version.make_servicer(shard), server)
    names = (version.pb.DESCRIPTOR.services_by_name["TextGenerationService"].full_name for version in (v2, v3))
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    clear_way(settings.socket_path)  # another server may have come while this one was loading
    try:
        server.add_insecure_port(f"unix:{settings.socket_path}")
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {settings.socket_path}: choose another --uds-path") from error
    try:
        await server.start()
        logger.info("serving on {}", settings.socket_path)
        await _first(stop, mailbox.failed)
        if not mailbox.failed.done():
            return 0
        logger.error("stopping: {}", mailbox.failed.result())
        return 1
    finally:
        stopping = asyncio.create_task(server.stop(inf))  # from now on new calls are refused
        with suppress(OSError):  # whatever has happened to its folder meanwhile
            settings.socket_path.unlink()
        await mailbox.close()
        await server.stop(LAST_WORDS_S)
        await stopping


def clear_way(path: Path) -> None:
    """Remove a socket file that nobody answers: it is a leftover.

    Raises:
        ValueError: another server listens on it, something that is no socket is in the way, or its folder cannot be
            used. The message says what to do.
    """
    advice = "choose another --uds-path"
    try:
        if not path.parent.is_dir():
            raise ValueError(f"{path.parent} is not a folder: {advice}")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"{path.parent} cannot be written to: {advice}")
        if not path.exists():
            return
        if not path.is_socket():
            raise ValueError(f"{path} exists and is not a socket: {advice}")
        if _is_answered(path):
            raise ValueError(f"another server is listening on {path}: {advice}")
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be used ({error.strerror}): {advice}") from error


def _is_answered(path: Path) -> bool:
    """Whether a process listens on a socket, be it busy."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # or a listener that accepts nobody would hold this server up
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # its queue is full
            return True
    return True


def _stop_on_signals() -> "asyncio.Future[None]":
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        logger.info("received {}", number.name)
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _first(*awaitables: Awaitable[object]) -> None:
    await asyncio.wait(map(asyncio.ensure_future, awaitables), return_when=asyncio.FIRST_COMPLETED)
