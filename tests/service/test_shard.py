"""What the shard adds to the mailbox."""

import asyncio
from typing import Any, cast

import pytest

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.types import CachedBatch, Generation, Limits, ModelInfo, StepResult, Tokens
from tpu_tgi_server.mailbox.root import RootMailbox
from tpu_tgi_server.service import shard
from tpu_tgi_server.service.shard import Shard

BATCH = CachedBatch(1, (1,), 0)
TOKEN = Generation(1, Tokens((5,), (0.0,), ("x",), (False,)))
INFO = ModelInfo("", "", "", Limits(1, 1, 2), None)


class AnsweringMailbox:
    """Owns the one answer that it gives, and the ids that were cleared."""

    def __init__(self, *generations: Generation, batch: CachedBatch | None = BATCH) -> None:
        self.answer = StepResult(generations, batch, 0, 0, 0)
        self.cleared: list[int | None] = []

    async def decode(self, _batches: tuple[CachedBatch, ...]) -> StepResult:
        return self.answer

    async def clear(self, batch_id: int | None) -> None:
        self.cleared.append(batch_id)


def decode(mailbox: AnsweringMailbox) -> "asyncio.Task[StepResult]":
    return asyncio.create_task(Shard(Settings("model"), cast(RootMailbox, mailbox), INFO).decode((BATCH,)))


async def run_what_can() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def pauses_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "IDLE_PAUSE_S", 3600)


@pytest.mark.parametrize("mailbox", [AnsweringMailbox(TOKEN), AnsweringMailbox(batch=None)])
async def test_decode_that_has_done_something_is_answered_at_once(mailbox: Any) -> None:
    call = decode(mailbox)
    await run_what_can()
    assert call.result() is mailbox.answer


async def test_answer_of_a_decode_that_can_do_nothing_waits_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    call = decode(AnsweringMailbox())
    await run_what_can()
    assert not call.done()
    call.cancel()
    monkeypatch.setattr(shard, "IDLE_PAUSE_S", 0.001)
    assert (await decode(AnsweringMailbox())).batch == BATCH


async def test_batch_of_a_client_that_hangs_up_during_the_pause_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "IDLE_PAUSE_S", 0.05)
    mailbox = AnsweringMailbox()
    call = decode(mailbox)
    await run_what_can()
    call.cancel()
    while not mailbox.cleared:
        await asyncio.sleep(0.01)
    assert mailbox.cleared == [1]
