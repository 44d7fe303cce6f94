"""The root's mailbox: one ordered stream of commands to the agent, as coroutines that never block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.types import Batch, CachedBatch, ModelInfo, StepResult
from tpu_tgi_server.mailbox.messages import (
    Clear,
    Command,
    Decode,
    Filter,
    Filtered,
    Prefill,
    Progress,
    Ready,
    Refused,
    Reply,
    WarmUp,
)
from tpu_tgi_server.mailbox.process import AgentDiedError, AgentProcess

ReplyT = TypeVar("ReplyT")
DEFAULT_LOADER = "tpu_tgi_server.engine.loading:load_generator"


class RootMailbox:
    """Owns the agent and the one thread that talks to it. That thread's queue is the order of the commands.

    `died` is done as soon as the agent's process has ended, whether a call was in flight or not.
    """

    def __init__(
        self, settings: Settings, on_progress: Callable[[Progress], None], loader: str = DEFAULT_LOADER
    ) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._loader = loader
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mailbox")
        self._loop = asyncio.get_running_loop()
        self._agent: AgentProcess | None = None
        self.died: asyncio.Future[str] = self._loop.create_future()

    @property
    def is_alive(self) -> bool:
        return self._agent is not None and not self.died.done()

    async def start(self) -> ModelInfo:
        """Spawn the agent and wait until its model is loaded.

        Raises:
            AgentDiedError: it could not load; the message says why.
        """
        self._agent = AgentProcess(self._settings, self._loader, self._on_progress)
        self._loop.add_reader(self._agent.sentinel, self._on_sentinel)
        ready = await self._in_thread(self._agent.receive, None)
        assert isinstance(ready, Ready)
        return ready.info

    async def prefill(self, batch: Batch) -> StepResult:
        """See `Generator.prefill`."""
        return await self._call(StepResult, Prefill(batch), self._settings.step_timeout_s)

    async def decode(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """See `Generator.decode`."""
        return await self._call(StepResult, Decode(batches), self._settings.step_timeout_s)

    async def filter(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch | None:
        """See `Generator.filter`."""
        filtered = await self._call(Filtered, Filter(batch_id, request_ids), self._settings.step_timeout_s)
        return filtered.batch

    async def clear(self, batch_id: int | None) -> None:
        """See `Generator.clear`."""
        await self._call(object, Clear(batch_id), self._settings.step_timeout_s)

    async def warm_up(self) -> None:
        """See `Generator.warm_up`. The deadline counts from one compiled graph to the next."""
        await self._call(object, WarmUp(), self._settings.step_timeout_s)

    async def close(self) -> None:
        """End the agent, however busy it is. Calls in flight raise AgentDiedError."""
        if self._agent is not None:
            self._loop.remove_reader(self._agent.sentinel)
            await asyncio.to_thread(self._agent.stop)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _call(self, kind: type[ReplyT], command: Command, timeout_s: float) -> ReplyT:
        if self._agent is None or self.died.done():
            raise AgentDiedError(self.died.result() if self.died.done() else "the agent is not started")
        reply = await self._in_thread(self._agent.request, command, timeout_s)
        if isinstance(reply, Refused):
            raise reply.error
        assert isinstance(reply, kind)
        return reply

    async def _in_thread(self, function: Callable[..., Reply], *arguments: object) -> Reply:
        try:
            # shielded, or a caller that goes away would take its command out of the queue
            running = self._loop.run_in_executor(self._executor, function, *arguments)
            running.add_done_callback(_forget_failure)
            return await asyncio.shield(running)
        except AgentDiedError as error:
            self._mark_dead(str(error))
            raise

    def _on_sentinel(self) -> None:
        assert self._agent is not None
        self._loop.remove_reader(self._agent.sentinel)
        self._mark_dead("the agent's process ended")

    def _mark_dead(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)


def _forget_failure(running: "asyncio.Future[Reply]") -> None:
    """A failure that nobody waits for any more is none to report."""
    if not running.cancelled():
        running.exception()
