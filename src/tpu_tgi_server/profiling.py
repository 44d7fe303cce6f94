"""Where the time of each call goes, as a file that a browser's trace viewer opens (Perfetto, chrome://tracing).

Root and agent append to one file, an event a line, in the JSON array format of Chrome's trace viewer, whose last
bracket may be missing. Unless `start_profile` was called nothing is written, and a span costs about a microsecond.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loguru import logger

MAX_EVENTS = 500_000
"""Of one process, at about 100 bytes each: a profile that is forgotten does not fill the disk."""


class _Profile:
    """Owns the file descriptor, and how many events may still be written: none after one that could not be."""

    def __init__(self, file: int, process_name: str) -> None:
        self._file = file
        self._num_left = MAX_EVENTS
        self._pid = os.getpid()
        self.write("process_name", "M", args={"name": process_name})

    def write(self, name: str, phase: str, **fields: object) -> None:
        """Append one event in one write, so that two processes do not mix their lines."""
        if self._num_left > 0:
            self._num_left -= 1
            event = {"name": name, "ph": phase, "pid": self._pid, "tid": threading.get_native_id(), **fields}
            try:
                os.write(self._file, (json.dumps(event) + ",\n").encode())
            except OSError as error:
                self._num_left = 0
                warn(error)


_profile: _Profile | None = None


def create_profile(path: Path) -> None:
    """Make the file, empty but for its first bracket.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        path.write_text("[\n")
    except OSError as error:
        raise ValueError(f"--profile: {error}") from error


def start_profile(path: Path | None, process_name: str) -> None:
    """From now on, write this process's spans to a file that `create_profile` has made; None for no profile.

    Whatever becomes of the file later is no reason not to serve: an agent may start when it is long gone.
    """
    global _profile
    _profile = None
    if path is not None:
        try:
            _profile = _Profile(os.open(path, os.O_WRONLY | os.O_APPEND), process_name)
        except OSError as error:
            warn(error)


def warn(error: OSError) -> None:
    """Say that this process goes on without a profile."""
    logger.warning("--profile ends here: {}", error)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Time what happens inside, on this thread."""
    profile = _profile
    if profile is None:
        yield
        return
    started = time.perf_counter_ns()
    try:
        yield
    finally:
        ended = time.perf_counter_ns()
        profile.write(name, "X", ts=started / 1000, dur=(ended - started) / 1000)


@contextmanager
def task_span(name: str) -> Iterator[None]:
    """Time what happens inside, in this asyncio task: those of other tasks may overlap."""
    profile = _profile
    if profile is None:
        yield
        return
    task = {"cat": "task", "id": id(asyncio.current_task())}
    profile.write(name, "b", ts=time.perf_counter_ns() / 1000, **task)
    try:
        yield
    finally:
        profile.write(name, "e", ts=time.perf_counter_ns() / 1000, **task)
