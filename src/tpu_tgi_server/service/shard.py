"""What every version of the protocol has in common: the RPCs in terms of the engine's dataclasses."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from loguru import logger

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.types import Batch, CachedBatch, EngineError, ErrorKind, ModelInfo, StepResult
from tpu_tgi_server.mailbox.process import AgentDiedError
from tpu_tgi_server.mailbox.root import RootMailbox

IDLE_PAUSE_S = 0.005
"""How long the answer to a Decode waits in which nothing has happened."""


class Shard:
    """Owns nothing but the road to the mailbox: rules that hold for every version of the protocol."""

    def __init__(self, settings: Settings, mailbox: RootMailbox, info: ModelInfo) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._background: set[asyncio.Task[None]] = set()
        self.info = info

    @property
    def url(self) -> str:
        """The form that TGI's routers strip back to a path."""
        return f"unix://{self._settings.socket_path}"

    def check_health(self) -> None:
        """Raises:
        AgentDiedError: the agent is gone.
        """
        if not self._mailbox.is_alive:
            raise AgentDiedError("the agent is not running")

    async def prefill(self, batch: Batch) -> StepResult:
        """Admit a batch. If the caller goes away meanwhile, nobody will ever decode it, so it is cleared."""
        return await self._or_clear(self._mailbox.prefill(batch), [batch.id])

    async def decode(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """One token more. If the caller goes away meanwhile, its batches are cleared."""
        return await self._or_clear(self._decode_or_pause(batches), [batch.id for batch in batches])

    async def filter(self, batch_id: int, request_ids: tuple[int, ...]) -> CachedBatch | None:
        """Keep only some requests of a batch."""
        return await self._mailbox.filter(batch_id, request_ids)

    async def clear(self, batch_id: int | None) -> None:
        """Drop a batch, or everything."""
        await self._mailbox.clear(batch_id)

    async def warm_up(self, max_input_tokens: int, max_total_tokens: int) -> int:
        """Compile everything, after checking that the router's limits fit the shard's. 0: the router has no limit.

        Returns:
            The tokens that all slots hold together, which the router takes as its budget.

        Raises:
            EngineError: a limit of the router is beyond the shard's; the message names the flag.
        """
        limits = self.info.limits
        if max_total_tokens > limits.max_total_tokens:
            raise EngineError(
                ErrorKind.INVALID,
                f"the router's max_total_tokens {max_total_tokens} is more than the shard's {limits.max_total_tokens}: "
                f"start the shard with --max-total-tokens {max_total_tokens}, or lower the router's",
            )
        if max_input_tokens > limits.max_input_tokens:
            raise EngineError(
                ErrorKind.INVALID,
                f"the router's max_input_tokens {max_input_tokens} is more than the shard's {limits.max_input_tokens}: "
                f"start the shard with --max-input-tokens {max_input_tokens}, or lower the router's",
            )
        if not self._settings.skip_warmup:
            await self._mailbox.warm_up()
        return limits.num_cached_tokens

    async def _decode_or_pause(self, batches: tuple[CachedBatch, ...]) -> StepResult:
        """A batch whose requests all wait for slots that other batches hold has nothing to do.

        Its client may ask again at once, and server and client would keep two cores busy with that. So the answer waits
        a moment; other calls do not.
        """
        result = await self._mailbox.decode(batches)
        if not result.generations and result.batch is not None:
            await asyncio.sleep(IDLE_PAUSE_S)
        return result

    async def _or_clear(self, step: Coroutine[Any, Any, StepResult], batch_ids: list[int]) -> StepResult:
        task = asyncio.ensure_future(step)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            clearing = asyncio.create_task(self._clear_after(task, batch_ids))
            self._background.add(clearing)
            clearing.add_done_callback(self._background.discard)
            raise

    async def _clear_after(self, step: "asyncio.Future[StepResult]", batch_ids: list[int]) -> None:
        """Clear what a step has left live. A step that was refused has changed nothing, so nothing is cleared."""
        try:
            await step
            for batch_id in batch_ids:
                await self._mailbox.clear(batch_id)
        except (EngineError, AgentDiedError) as error:
            logger.debug("batches {} were not cleared: {}", batch_ids, error)
