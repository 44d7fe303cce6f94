"""The life of one agent: start, calls in order, death, another in its place.

An agent that dies takes its requests with it, so calls in flight fail. Another agent is started in its place, and while
it loads every call fails at once.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from loguru import logger

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.types import GrammarSource, ModelInfo
from tpu_tgi_server.mailbox.messages import Command, Done, Prepare, Prepared, Progress, Ready, Refused, Reply, WarmUp
from tpu_tgi_server.mailbox.process import AgentDiedError, AgentProcess
from tpu_tgi_server.mailbox.shares import Share
from tpu_tgi_server.profiling import task_span

PREPARE_PAUSE_S = 0.01
"""How often to ask whether grammars are compiled."""

MAX_DEATHS = 3
"""So many deaths without a request's end or a Decode in between, and the agent is given up: the next would die too."""

ReplyT = TypeVar("ReplyT")


class Replica:
    """Owns one agent at a time, and the one thread that talks to it. That thread's queue is the order of the commands.

    `failed` is done with the reason when the agent is given up: after MAX_DEATHS deaths in a row.

    Args:
        settings: what the agent loads.
        share: its part of the machine.
        loader: see `agent.Loader`.
        on_progress: called from the thread.
        on_death: called on the event loop, before anything else learns of a death.
    """

    def __init__(
        self,
        settings: Settings,
        share: Share,
        loader: str,
        on_progress: Callable[[Progress], None],
        on_death: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._share = share
        self._loader = loader
        self._on_progress = on_progress
        self._tell_death = on_death
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mailbox")
        self._loop = asyncio.get_running_loop()
        self._agent: AgentProcess | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_ready = False
        self._is_warm = False
        self._num_deaths = 0
        self.failed: asyncio.Future[str] = self._loop.create_future()

    @property
    def is_alive(self) -> bool:
        """Whether an agent is there that takes commands."""
        return self._is_ready

    async def start(self) -> ModelInfo:
        """Spawn the first agent and wait until its model is loaded.

        Raises:
            AgentDiedError: it could not load, or got stuck; the message says why. It is not tried again.
        """
        self._agent = self._spawn()
        ready = await self._in_thread(self._agent.receive, self._settings.load_timeout_s)
        assert isinstance(ready, Ready)
        self._begin(self._agent)
        return ready.info

    async def call(self, kind: type[ReplyT], command: Command) -> ReplyT:
        """Have a command carried out, after those that were given before.

        Raises:
            EngineError: it was refused, and nothing has changed.
            AgentDiedError: the agent died, or is being loaded again.
        """
        agent = self._agent
        if agent is None or not self._is_ready:
            raise AgentDiedError("the model is being loaded again after a failure, try later")
        try:
            with task_span(f"mailbox {type(command).__name__}"):
                reply = await self._in_thread(agent.request, command, self._settings.step_timeout_s)
        except AgentDiedError as error:
            self._on_death(agent, str(error))
            raise
        if isinstance(reply, Refused):
            raise reply.error
        assert isinstance(reply, kind)
        return reply

    async def prepare(self, grammars: tuple[GrammarSource, ...]) -> None:
        """Wait until grammars are compiled or refused. Meanwhile other commands have their turn."""
        while grammars and not (await self.call(Prepared, Prepare(grammars))).is_done:
            await asyncio.sleep(PREPARE_PAUSE_S)

    async def warm_up(self) -> None:
        """See `Generator.warm_up`; agents to come are warmed up too. The deadline counts from graph to graph."""
        self._is_warm = True  # before the call, whose caller may go away while the agent warms up all the same
        if not self._is_ready:
            return
        try:
            await self.call(Done, WarmUp())
        except Exception:
            self._is_warm = False
            raise

    def note_success(self) -> None:
        """Begin to count deaths anew."""
        self._num_deaths = 0

    async def close(self) -> None:
        """End the agent, however busy it is. Calls in flight raise AgentDiedError."""
        if self._is_ready:
            self._is_ready = False
            self._tell_death()
        if self._restarting is not None:
            self._restarting.cancel()
        if self._agent is not None:
            self._loop.remove_reader(self._agent.sentinel)
            await asyncio.to_thread(self._agent.stop)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _spawn(self) -> AgentProcess:
        return AgentProcess(self._settings, self._loader, self._on_progress, self._share)

    async def _in_thread(self, function: Callable[..., Reply], *arguments: object) -> Reply:
        # shielded, or a caller that goes away would take its command out of the queue
        running = self._loop.run_in_executor(self._executor, function, *arguments)
        running.add_done_callback(_forget_failure)
        return await asyncio.shield(running)

    def _begin(self, agent: AgentProcess) -> None:
        """Let a loaded agent take commands, and watch over it also while there are none."""
        self._is_ready = True
        self._loop.add_reader(agent.sentinel, self._on_death, agent)

    def _on_death(self, agent: AgentProcess, reason: str | None = None) -> None:
        """Called for a death as often as it is noticed; acts once. The reason is known to whoever was in a call."""
        if agent is not self._agent or not self._is_ready:
            return
        self._is_ready = False
        self._loop.remove_reader(agent.sentinel)
        self._tell_death()
        self._restarting = asyncio.create_task(self._replace(reason))
        self._restarting.add_done_callback(self._on_replaced)

    def _on_replaced(self, replacing: "asyncio.Task[None]") -> None:
        """Whatever keeps an agent from being replaced at all (no process can be started) gives it up."""
        if replacing.cancelled():
            return
        error = replacing.exception()
        if error is not None:
            self.failed.set_result(f"the model cannot be loaded again: {type(error).__name__}: {error}")

    async def _replace(self, reason: str | None) -> None:
        """Load agents until one is ready, or until MAX_DEATHS have died."""
        assert self._agent is not None
        if reason is None:
            try:
                await self._in_thread(self._agent.listen_to_the_end)
            except AgentDiedError as error:
                reason = str(error)
        while True:
            await asyncio.to_thread(self._agent.stop)
            self._num_deaths += 1
            if self._num_deaths >= MAX_DEATHS:
                self.failed.set_result(f"{reason} ({self._num_deaths} agents have died in a row)")
                return
            logger.error("{}; loading the model again", reason)
            self._agent = self._spawn()
            try:
                await self._load(self._agent)
            except AgentDiedError as error:
                reason = str(error)
                continue
            logger.info("the model is loaded again")
            self._begin(self._agent)
            return

    async def _load(self, agent: AgentProcess) -> None:
        """Wait until an agent is as ready as the one before it was."""
        await self._in_thread(agent.receive, self._settings.load_timeout_s)
        if self._is_warm:
            reply = await self._in_thread(agent.request, WarmUp(), self._settings.step_timeout_s)
            if isinstance(reply, Refused):
                raise AgentDiedError(reply.error.message)


def _forget_failure(running: "asyncio.Future[Reply]") -> None:
    """A failure that nobody waits for any more is none to report."""
    if not running.cancelled():
        running.exception()
