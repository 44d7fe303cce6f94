"""One agent seen from the root: its process, and a blocking round trip to it."""

import multiprocessing
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Never

from tpu_tgi_server.config import Settings
from tpu_tgi_server.mailbox.messages import Broken, Command, Progress, Reply
from tpu_tgi_server.mailbox.shares import Share

STOP_GRACE_S = 2.0
"""How long an agent may take to end by itself, and again after SIGTERM, before it is killed."""


CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
"""Never "fork": a fork would copy the root's gRPC threads, and the root's locks with them."""


class AgentDiedError(Exception):
    """The agent is gone, and with it every request that it held."""


class AgentProcess:
    """Owns one agent process and the root's end of the connection to it.

    The connection is a socket pair, which no other process can reach.

    Args:
        loader: see `agent.Loader`; None for a process that only says what the model takes of memory.
    """

    def __init__(
        self,
        settings: Settings,
        loader: str | None,
        on_progress: Callable[[Progress], None],
        share: Share | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._connection: Connection
        self._connection, agent_end = CONTEXT.Pipe(duplex=True)
        self._process = CONTEXT.Process(
            target=_run_agent, args=(settings, loader, agent_end, share or {}), name="tpu-tgi-agent", daemon=True
        )
        self._process.start()
        agent_end.close()  # or its end would never read as closed
        self._timeout_s = settings.step_timeout_s
        self._waiting = threading.Lock()
        self._last_words: str | None = None
        self._limit_blocking()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""
        return self._process.sentinel

    def request(self, command: Command, timeout_s: float) -> Reply:
        """Send a command and wait for its reply. Blocks. The deadline counts anew from each progress report.

        Raises:
            AgentDiedError: the agent died, said that it is broken, or did not answer in time and was killed.
        """
        try:
            self._connection.send(command)
        except BlockingIOError as error:
            raise self._overdue(self._timeout_s) from error
        except OSError as error:
            raise AgentDiedError(self._epitaph()) from error
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> Reply:
        """Wait for the next reply, passing progress on. Blocks; raises as `request` does."""
        try:
            while self._connection.poll(timeout_s):
                message: Reply | Progress = self._connection.recv()
                if isinstance(message, Broken):
                    self._last_words = message.reason
                    raise AgentDiedError(message.reason)
                if not isinstance(message, Progress):
                    return message
                self._on_progress(message)
        except BlockingIOError as error:
            raise self._overdue(self._timeout_s) from error
        except (EOFError, OSError) as error:
            raise AgentDiedError(self._epitaph()) from error
        raise self._overdue(timeout_s)

    def listen_to_the_end(self) -> Never:
        """Find out why an agent has ended that nobody was talking to. Raises as `request` does."""
        while True:
            self.receive(STOP_GRACE_S)  # its end of the connection may close a little later than the process ends

    def stop(self) -> None:
        """End the process: ask, then SIGTERM, then SIGKILL. Blocks for at most three times STOP_GRACE_S."""
        for end in (self._hang_up, self._process.terminate, self._process.kill):
            end()
            if self._wait_for_status() is not None:
                return

    def _limit_blocking(self) -> None:
        """Let a read or a write in the middle of a message fail when the other end has stopped."""
        seconds, rest = divmod(self._timeout_s, 1)
        timeval = struct.pack("ll", int(seconds), int(rest * 1e6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, timeval)

    def _overdue(self, timeout_s: float) -> AgentDiedError:
        """The end of an agent that has kept the root waiting for too long."""
        self._process.kill()
        return AgentDiedError(f"the agent did not answer within {timeout_s:g} s and was killed")

    def _hang_up(self) -> None:
        """Let the agent read an end of file. Closing would pull the descriptor from under a thread that waits on it."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as half, suppress(OSError):
            half.shutdown(socket.SHUT_WR)

    def _wait_for_status(self) -> int | None:
        """The exit status, if the process ends in time. One thread at a time: of two that wait, one would miss it."""
        with self._waiting:
            self._process.join(STOP_GRACE_S)
            return self._process.exitcode

    def _epitaph(self) -> str:
        if self._last_words is not None:
            return self._last_words
        code = self._wait_for_status()
        if code is None:
            return "the agent closed its connection"
        return f"the agent was ended by signal {-code}" if code < 0 else f"the agent exited with status {code}"


def _run_agent(settings: Settings, loader: str | None, connection: Connection, share: Share) -> None:
    """The agent's end is imported in the agent's process only: it brings torch and transformers with it.

    They read the environment when they are loaded.
    """
    os.environ.update(share)
    from tpu_tgi_server.mailbox.agent import run_agent_process

    run_agent_process(settings, loader, connection)
