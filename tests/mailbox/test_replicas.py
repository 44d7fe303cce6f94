"""Two agents behind one mailbox: real processes, which follow a script."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.mailbox.mailboxes import agents, new_mailbox, started, until, until_alive
from tests.reference import encode
from tests.scripted import Faults, arithmetic_id
from tpu_tgi_server.engine.types import (
    LIVENESS_ID,
    Batch,
    CachedBatch,
    EngineError,
    FinishReason,
    Generation,
    Request,
    Stopping,
)
from tpu_tgi_server.mailbox.messages import Progress
from tpu_tgi_server.mailbox.process import AgentDiedError
from tpu_tgi_server.mailbox.root import RootMailbox

pytestmark = pytest.mark.usefixtures("agents_fork_from_a_process_that_has_the_libraries")

NEW = 12


class Client:
    """Owns what a router keeps: the batch that is live, and the ids that each request has brought."""

    def __init__(self, mailbox: RootMailbox) -> None:
        self._mailbox = mailbox
        self.live: CachedBatch | None = None
        self.ids: dict[int, list[int]] = {}
        self.ended: set[int] = set()

    async def join(self, batch_id: int, *request_ids: int, new: int = NEW) -> None:
        """Prefill a batch, and decode it together with what is live."""
        result = await self._mailbox.prefill(batch_of(batch_id, *request_ids, new=new))
        self.ids.update((id, []) for id in request_ids)
        self._take(result.generations)
        if self.live is None:
            self.live = result.batch
        elif result.batch is not None:
            await self.decode(self.live, result.batch)

    async def decode(self, *batches: CachedBatch) -> None:
        named = batches or (self.live,)
        result = await self._mailbox.decode(tuple(batch for batch in named if batch is not None))
        self._take(result.generations)
        self.live = result.batch

    async def drain(self) -> None:
        while self.live is not None:
            await self.decode()

    def _take(self, generations: tuple[Generation, ...]) -> None:
        for generation in generations:
            assert generation.request_id not in self.ended
            self.ids[generation.request_id] += generation.tokens.ids
            if generation.generated_text is not None:
                assert generation.generated_text.finish_reason is FinishReason.LENGTH
                self.ended.add(generation.request_id)

    def check(self, new: int = NEW) -> None:
        """Every request has brought its own tokens, all of them, and once."""
        for request_id, ids in self.ids.items():
            assert ids == [arithmetic_id(encode(prompt(request_id)), step) for step in range(new)], request_id
        assert self.ended == self.ids.keys()


def prompt(request_id: int) -> str:
    return f"prompt {request_id}"


def batch_of(batch_id: int, *request_ids: int, new: int = NEW) -> Batch:
    return Batch(batch_id, tuple(Request(id, prompt(id), Stopping(new)) for id in request_ids))


def two(faults: Faults, steps: list[Progress] | None = None, **given: Any) -> RootMailbox:
    return new_mailbox(faults, steps, **{"replicas": 2, "max_batch_size": 4, **given})


@asynccontextmanager
async def two_started(faults: Faults | None = None, **given: Any) -> AsyncIterator[tuple[RootMailbox, Client]]:
    async with started(two(faults or Faults(), **given)) as mailbox:
        yield mailbox, Client(mailbox)


def agent(mailbox: RootMailbox, number: int) -> psutil.Process:
    process = mailbox._replicas[number]._agent
    assert process is not None
    return psutil.Process(process.pid)


async def kill(mailbox: RootMailbox, number: int) -> None:
    """Kill an agent, and wait until that is noticed."""
    agent(mailbox, number).kill()
    await until(lambda: not mailbox._replicas[number].is_alive)


async def until_all_alive(mailbox: RootMailbox) -> None:
    await until(lambda: all(replica.is_alive for replica in mailbox._replicas))


def homes(mailbox: RootMailbox) -> dict[int, int | None]:
    """The agent of each live request."""
    residents = mailbox._placement._residents
    return {id: resident.part.agent if resident.part else None for id, resident in residents.items()}


@pytest.mark.parametrize(("max_batch_size", "num_slots"), [(4, 4), (5, 6), (1, 2)])
async def test_slots_are_divided_rounded_up_and_reported_together(max_batch_size: int, num_slots: int) -> None:
    mailbox = two(Faults(), max_batch_size=max_batch_size)
    try:
        info = await mailbox.start()
        assert info.limits.num_slots == num_slots
        assert info.limits.num_cached_tokens == num_slots * 256
    finally:
        await mailbox.close()


async def test_requests_are_spread_and_bring_what_one_agent_would() -> None:
    """Also those that join and those that wait for a slot."""
    async with two_started() as (mailbox, client):
        await client.join(0, 0, 1, 2)
        assert homes(mailbox) == {0: 0, 1: 1, 2: 0}
        await client.join(1, 3, 4, 5, 6)
        assert homes(mailbox) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0}
        assert client.live == CachedBatch(0, tuple(range(7)), 7 * 256)
        await client.drain()
        client.check()
        assert homes(mailbox) == {}


async def test_refusal_is_all_or_nothing_across_agents() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0, 1)
        bad = Batch(1, (*batch_of(1, 2).requests, *batch_of(1, 3, new=0).requests))
        for _ in range(2):
            with pytest.raises(EngineError, match="request 3: max_new_tokens must be at least 1"):
                await mailbox.prefill(bad)
        assert homes(mailbox).keys() == {0, 1}
        await client.join(1, 2, 3)
        assert all(client.ids[id] for id in range(4)), "the first part has left a slot taken"
        await client.drain()
        client.check()


async def test_request_id_that_lives_on_another_agent_is_refused() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0)
        with pytest.raises(EngineError, match="request id 0 is used twice"):
            await mailbox.prefill(batch_of(1, 0))


async def test_calls_given_together_are_carried_out_in_order() -> None:
    async with two_started(Faults(prefill_s=0.1)) as (mailbox, _):
        named = CachedBatch(0, (0, 1), 0)
        prefilled, decoded, filtered, cleared, unknown = await asyncio.gather(
            mailbox.prefill(batch_of(0, 0, 1)),
            mailbox.decode((named,)),
            mailbox.filter(0, (1,)),
            mailbox.clear(0),
            mailbox.decode((named,)),
            return_exceptions=True,
        )
        assert not isinstance(prefilled, BaseException)
        assert not isinstance(decoded, BaseException)
        assert [len(result.generations) for result in (prefilled, decoded)] == [2, 2]
        assert filtered == CachedBatch(0, (1,), 256)
        assert cleared is None
        assert isinstance(unknown, EngineError)


async def test_filter_and_clear_reach_every_agent() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0, 1, 2, 3)
        assert await mailbox.filter(0, (3,)) == CachedBatch(0, (3,), 256)
        await mailbox.prefill(batch_of(1, 10, 11, 12))
        assert homes(mailbox) == {3: 1, 10: 0, 11: 0, 12: 1}
        await mailbox.clear(1)
        assert homes(mailbox) == {3: 1}
        client.live = await mailbox.filter(0, (3, 99))
        await mailbox.prefill(batch_of(2, 20, 21))
        await mailbox.clear(None)
        assert homes(mailbox) == {}
        result = await mailbox.prefill(batch_of(0, 0, 1, 2, 3))
        assert len(result.generations) == 4, "a slot was still taken"


async def test_request_that_a_decode_does_not_name_leaves_its_agent() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0, 1)
        await client.decode(CachedBatch(0, (1,), 0))
        assert homes(mailbox) == {1: 1}
        result = await mailbox.prefill(batch_of(1, 2, 3, 4))
        assert len(result.generations) == 3, "a slot was still taken"


async def test_streams_go_on_unharmed_when_an_agent_is_killed() -> None:
    """Its own requests wait for it, as the other is full; new ones go to the other meanwhile; then it is back."""
    async with two_started(Faults(load_s=1.0)) as (mailbox, client):
        await client.join(0, 0, 1, 2, 3, 4)
        await client.decode()
        before = agent(mailbox, 0).pid
        await kill(mailbox, 0)
        assert mailbox.is_alive
        assert homes(mailbox) == {0: None, 1: 1, 2: None, 3: 1, 4: None}
        await client.decode()
        assert homes(mailbox) == {0: None, 1: 1, 2: None, 3: 1, 4: None}
        await client.join(1, 5)
        assert homes(mailbox)[5] == 1
        await until_all_alive(mailbox)
        assert agent(mailbox, 0).pid != before
        await client.decode()
        assert homes(mailbox) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
        await client.drain()
        client.check()
        assert not mailbox.failed.done()


async def test_requests_of_a_dead_agent_move_at_once_where_slots_are_free() -> None:
    async with two_started(Faults(load_s=1.0), max_batch_size=6) as (mailbox, client):
        await client.join(0, 0, 1, 2, 3, 4)
        await kill(mailbox, 0)
        await client.decode()
        assert homes(mailbox) == {0: 1, 1: 1, 2: None, 3: 1, 4: None}
        await client.drain()
        client.check()


async def test_death_in_the_middle_of_a_decode_fails_nobody() -> None:
    async with two_started(Faults(decode_s=0.3)) as (mailbox, client):
        await client.join(0, 0, 1, new=4)
        step = asyncio.create_task(client.decode())
        await asyncio.sleep(0.1)
        agent(mailbox, 1).kill()
        await step
        await client.drain()
        client.check(new=4)


async def test_every_agent_may_die_in_turn() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0, 1, 2, 3, new=40)
        for number in (0, 1, 0, 1):
            for _ in range(8):
                await client.decode()
            await kill(mailbox, number)
            await client.decode()
            await until_all_alive(mailbox)
        await client.drain()
        client.check(new=40)


async def test_prefill_fails_as_a_whole_when_one_of_its_agents_dies() -> None:
    async with two_started(Faults(prefill_s=0.5)) as (mailbox, client):
        await client.join(0, 0)
        call = asyncio.create_task(mailbox.prefill(batch_of(1, 1, 2)))
        await asyncio.sleep(0.1)
        agent(mailbox, 1).kill()
        with pytest.raises(AgentDiedError, match="signal 9"):
            await call
        assert homes(mailbox) == {0: 0}
        await client.join(1, 1, 2)
        await client.drain()
        client.check()


async def test_with_the_last_agent_all_batches_are_lost() -> None:
    async with two_started(Faults(load_s=1.0)) as (mailbox, client):
        await client.join(0, 0, 1)
        await kill(mailbox, 0)
        await kill(mailbox, 1)
        assert not mailbox.is_alive
        with pytest.raises(AgentDiedError, match="loaded again"):
            await client.decode()
        assert await mailbox.filter(0, (0, 1)) is None
        await until_alive(mailbox)
        with pytest.raises(EngineError, match="batch 0 is not known"):
            await client.decode()
        client.live = None
        await client.join(0, 0, 1)
        await client.drain()
        client.check()


async def test_request_that_three_agents_have_died_of_is_given_up() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0)
        await client.decode()
        await client.decode()
        for number in (0, 1):
            await kill(mailbox, number)
            await client.decode()
            assert homes(mailbox) == {0: 1 - number}
            await until_all_alive(mailbox)
        await kill(mailbox, 0)
        with pytest.raises(AgentDiedError, match="request 0 has lost three agents in a row"):
            await client.decode()
        assert homes(mailbox) == {}
        assert mailbox.is_alive


async def test_filter_and_clear_in_flight_survive_a_death() -> None:
    async with two_started() as (mailbox, client):
        await client.join(0, 0, 1)
        stopped = agent(mailbox, 0)
        stopped.suspend()
        calls = [asyncio.create_task(mailbox.filter(0, (0, 1))), asyncio.create_task(mailbox.clear(0))]
        await asyncio.sleep(0.1)
        stopped.kill()
        assert await asyncio.wait_for(asyncio.gather(*calls), 10) == [CachedBatch(0, (0, 1), 512), None]
        assert homes(mailbox) == {}


async def test_liveness_probe_is_answered_by_whoever_lives() -> None:
    async with two_started(Faults(load_s=1.0)) as (mailbox, client):
        await client.join(0, 0, 1, 2, 3, 4)
        for number in (0, 1):
            await kill(mailbox, number)
            result = await mailbox.prefill(Batch(LIVENESS_ID, (Request(LIVENESS_ID, "liveness", Stopping(1)),)))
            assert result.batch is None
            (generation,) = result.generations
            assert generation.generated_text is not None
            await until_all_alive(mailbox)


async def test_agent_that_is_given_up_leaves_the_others_to_go_on() -> None:
    async with two_started() as (mailbox, client):
        for replica in mailbox._replicas:
            replica._settings = replace(replica._settings, model_id=json.dumps({"load_error": "no such model"}))
        await client.join(0, 0, 1)
        await kill(mailbox, 0)
        assert "3 agents have died in a row" in await asyncio.wait_for(mailbox._replicas[0].failed, 60)
        await client.drain()
        client.check()
        assert mailbox.is_alive
        assert not mailbox.failed.done()
        await kill(mailbox, 1)
        assert "agents have died in a row" in await asyncio.wait_for(mailbox.failed, 60)


async def test_warm_up_reaches_all_and_those_to_come() -> None:
    steps: list[Progress] = []
    async with started(two(Faults(load_s=0.5), steps)) as mailbox:
        await mailbox.warm_up()
        assert {step.stage for step in steps} == {
            "agent 0: loading",
            "agent 1: loading",
            "agent 0: warming up",
            "agent 1: warming up",
        }
        steps.clear()
        await kill(mailbox, 1)
        await until_all_alive(mailbox)
        assert [step.stage for step in steps] == ["agent 1: loading"] * 2 + ["agent 1: warming up"] * 3


async def test_close_ends_all_agents_also_while_they_load() -> None:
    async with two_started(Faults(load_s=2.0)) as (mailbox, _):
        await kill(mailbox, 0)
        await until(lambda: len(agents()) == 2)


async def test_failure_to_load_is_told_and_leaves_nobody_behind() -> None:
    mailbox = two(Faults(load_error="no such model"))
    with pytest.raises(AgentDiedError, match=r"^no such model$"):
        await mailbox.start()
    await mailbox.close()
    assert agents() == []
