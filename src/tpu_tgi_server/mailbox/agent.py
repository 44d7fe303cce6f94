"""The agent's end: load a model on the device, then carry out commands one by one.

A thread of its own reads the connection, so the death of the root is noticed even while the device computes. Another
writes to it: a write wakes the root, which may take the core, and the next step need not wait for that.
"""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import TypeVar, assert_never

from loguru import logger

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.types import EngineError, ModelInfo
from tpu_tgi_server.logs import configure_logging, origin
from tpu_tgi_server.mailbox.messages import (
    Broken,
    Clear,
    Command,
    Decode,
    Done,
    Filter,
    Filtered,
    Measured,
    Prefill,
    Prepare,
    Prepared,
    Progress,
    Ready,
    Refused,
    Reply,
    WarmUp,
)
from tpu_tgi_server.model.interface import Graph, OnGraph
from tpu_tgi_server.profiling import span, start_profile
from tpu_tgi_server.runtime.interface import Runtime
from tpu_tgi_server.runtime.select import select_runtime

ORPHAN_GRACE_S = 3.0
"""How long an agent may finish what it is doing after its root is gone."""

PREPARE_WAIT_S = 0.002
"""Most grammars compile within this, and a Decode hardly notices it."""

OnStage = Callable[[str, int, int], None]
ResultT = TypeVar("ResultT")
Loader = Callable[[Settings, Runtime, OnStage], tuple[Generator, ModelInfo]]
"""Loads a model on a runtime. It is named by a "module:function" string, so that the root need not import it."""


def run_agent_process(settings: Settings, loader: str | None, connection: Connection) -> None:
    """The main function of an agent's process. It ends when the root closes the connection, or with status 1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal reaches us too, but is the root's to handle
    configure_logging(settings.logger_level, settings.json_output)
    start_profile(settings.profile, "agent")
    commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
    replies: queue.SimpleQueue[Reply | Progress | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True).start()
    writer = threading.Thread(target=_write_replies, args=(connection, replies))
    writer.start()
    try:
        runtime = select_runtime(settings.device, settings.compilation_cache, settings.parallel)
        if loader is None:
            _measure(settings, replies)
        else:
            runtime.launch(_run_agent, (settings, loader, runtime, commands, replies))
    except Exception as error:
        is_expected = isinstance(error, OSError | ValueError)
        if not is_expected:
            logger.exception("the model could not be loaded")
        logger.opt(exception=True).debug("the model could not be loaded")
        replies.put(Broken(f"{error}" if is_expected else f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        replies.put(None)
        writer.join()


def _measure(settings: Settings, replies: "queue.SimpleQueue[Reply | Progress | None]") -> None:
    from tpu_tgi_server.engine.needs import model_needs  # with it come transformers' models, and torch_xla with them

    def on_file(name: str, done: int, total: int) -> None:
        replies.put(Progress("measuring", name, done, total))

    replies.put(Measured(model_needs(settings, on_file)))


def _run_agent(
    rank: int,
    settings: Settings,
    loader: str,
    runtime: Runtime,
    commands: "queue.SimpleQueue[Command | None]",
    replies: "queue.SimpleQueue[Reply | Progress | None]",
) -> None:
    load: Loader = resolve_name(loader)

    def on_stage(stage: str, done: int, total: int) -> None:
        replies.put(Progress("loading", stage, done, total))

    def on_graph(graph: Graph, done: int, total: int) -> None:
        replies.put(Progress("warming up", str(graph), done, total))

    generator, info = load(settings, runtime, on_stage)
    logger.debug("agent {} is ready", rank)
    replies.put(Ready(info))
    while (command := commands.get()) is not None:
        _put(replies, _or_broken(type(command).__name__, partial(_execute, generator, command, on_graph)))
        if settings.step_ahead and commands.empty():
            _put(replies, _or_broken("step ahead", generator.step_ahead))


def _put(replies: "queue.SimpleQueue[Reply | Progress | None]", reply: Reply | None) -> None:
    """Say what there is to say, and exit if it was the last."""
    if reply is not None:
        replies.put(reply)
    if isinstance(reply, Broken):
        sys.exit(1)


def _or_broken(name: str, action: Callable[[], ResultT]) -> ResultT | Broken:
    """What the action returns. A failure while requests are served may quote them, so it is told without its text."""
    try:
        with span(name):
            return action()
    except Exception as error:
        logger.exception("{} failed", name)
        logger.opt(exception=True).debug("{} failed", name)
        return Broken(f"{name} failed: {origin(error)}")


def _execute(generator: Generator, command: Command, on_graph: OnGraph) -> Reply:
    try:
        match command:
            case Prepare():
                return Prepared(generator.prepare(command.grammars, PREPARE_WAIT_S))
            case Prefill():
                return generator.prefill(command.batch)
            case Decode():
                return generator.decode(command.batches)
            case Filter():
                return Filtered(generator.filter(command.batch_id, command.request_ids))
            case Clear():
                generator.clear(command.batch_id)
                return Done()
            case WarmUp():
                generator.warm_up(on_graph)
                return Done()
            case _:
                assert_never(command)
    except EngineError as error:
        return Refused(error)


def _read_commands(connection: Connection, commands: "queue.SimpleQueue[Command | None]") -> None:
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):
        commands.put(None)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)


def _write_replies(connection: Connection, replies: "queue.SimpleQueue[Reply | Progress | None]") -> None:
    with suppress(BrokenPipeError):  # the root is gone, which the reading thread notices too
        while (reply := replies.get()) is not None:
            connection.send(reply)
