"""Mailboxes with real agent processes, which follow a script."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from multiprocessing import forkserver
from typing import Any

import psutil

from tests.scripted import Faults
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.types import Batch, Request, Stopping
from tpu_tgi_server.mailbox.messages import Progress
from tpu_tgi_server.mailbox.root import RootMailbox

SCRIPTED = "tests.scripted:load_scripted"


def new_mailbox(faults: Faults, steps: list[Progress] | None = None, **given: Any) -> RootMailbox:
    settings = replace(
        Settings(json.dumps(asdict(faults)), device=Device.CPU, logger_level="ERROR", step_timeout_s=60.0), **given
    )
    seen: list[Progress] = [] if steps is None else steps
    return RootMailbox(settings, seen.append, SCRIPTED)


@asynccontextmanager
async def started(mailbox: RootMailbox) -> AsyncIterator[RootMailbox]:
    """A mailbox whose agents are ready, and gone afterwards."""
    try:
        await mailbox.start()
        first = agents()
        assert len(first) == len(mailbox._replicas)
        yield mailbox
    finally:
        await mailbox.close()
    assert not any(agent.is_running() for agent in first)
    assert agents() == []


def agents() -> list[psutil.Process]:
    """The living ones: spawned by this process, or forked from the server that it has started."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    forked = [] if server is None else psutil.Process(server).children()
    spawned = [child for child in psutil.Process().children() if is_spawned(child)]
    return [*spawned, *filter(is_living, forked)]


def is_living(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended since it was listed
        return False


def is_spawned(process: psutil.Process) -> bool:
    return is_living(process) and "spawn_main" in " ".join(process.cmdline())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def until_alive(mailbox: RootMailbox) -> None:
    await until(lambda: mailbox.is_alive)


def batch(batch_id: int, prompt: str = "prompt", new: int = 5) -> Batch:
    return Batch(batch_id, (Request(batch_id, prompt, Stopping(new)),))
