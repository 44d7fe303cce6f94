"""The root's mailbox with a real agent process, which follows a script."""

import asyncio
import json
import time
from dataclasses import replace

import pytest

from tests.mailbox import peers
from tests.mailbox.mailboxes import agents, batch, new_mailbox, started, until, until_alive
from tests.reference import encode
from tests.scripted import Faults, arithmetic_id
from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    GrammarType,
    Request,
    Sampling,
    Stopping,
)
from tpu_tgi_server.mailbox.messages import Progress
from tpu_tgi_server.mailbox.process import AgentDiedError

pytestmark = pytest.mark.usefixtures("agents_fork_from_a_process_that_has_the_libraries")


async def test_commands_are_carried_out_in_the_order_they_are_given() -> None:
    """All are given before the first is answered."""
    async with started(new_mailbox(Faults(prefill_s=0.2))) as mailbox:
        prefilled, decoded, filtered, unknown = await asyncio.gather(
            mailbox.prefill(batch(1)),
            mailbox.decode((CachedBatch(1, (1,), 0),)),
            mailbox.filter(1, ()),
            mailbox.decode((CachedBatch(1, (1,), 0),)),
            return_exceptions=True,
        )
    expected = [arithmetic_id(encode("prompt"), step) for step in range(2)]
    assert not isinstance(prefilled, BaseException)
    assert not isinstance(decoded, BaseException)
    assert [result.generations[0].tokens.ids[0] for result in (prefilled, decoded)] == expected
    assert filtered is None
    assert isinstance(unknown, EngineError)
    assert unknown.kind is ErrorKind.UNKNOWN_BATCH


async def test_refusal_comes_back_as_it_was_raised_and_the_agent_goes_on() -> None:
    async with started(new_mailbox(Faults())) as mailbox:
        with pytest.raises(EngineError, match="max_new_tokens must be at least 1") as refusal:
            await mailbox.prefill(batch(1, new=0))
        assert refusal.value.kind is ErrorKind.INVALID
        await mailbox.clear(None)
        assert (await mailbox.prefill(batch(1))).batch == CachedBatch(1, (1,), 256)


async def test_running_requests_are_stepped_while_a_heavy_grammar_compiles() -> None:
    heavy = Sampling(grammar=".*" * 4000, grammar_type=GrammarType.REGEX)
    async with started(new_mailbox(Faults())) as mailbox:
        await mailbox.prefill(batch(1, new=200))
        constrained = asyncio.create_task(mailbox.prefill(Batch(2, (Request(2, "prompt", Stopping(5), heavy),))))
        num_steps = 0
        while not constrained.done():
            (generation,) = (await mailbox.decode((CachedBatch(1, (1,), 0),))).generations
            num_steps += 1
            assert generation.tokens.ids[0] == arithmetic_id(encode("prompt"), num_steps)
            await asyncio.sleep(0.02)
        with pytest.raises(EngineError, match=r"request 2: grammar .* does not compile within 2 seconds"):
            await constrained
        assert num_steps > 10
        assert (await mailbox.filter(1, (1,))) == CachedBatch(1, (1,), 256)


async def test_progress_is_passed_on_in_order() -> None:
    steps: list[Progress] = []
    async with started(new_mailbox(Faults(), steps)) as mailbox:
        assert steps == [Progress("loading", "script", 1, 2), Progress("loading", "faults", 2, 2)]
        await mailbox.warm_up()
    assert steps[2:] == [Progress("warming up", f"decode {number} greedy", number, 3) for number in (1, 2, 3)]


async def test_event_loop_runs_on_while_a_step_takes_its_time() -> None:
    async with started(new_mailbox(Faults(prefill_s=0.5))) as mailbox:
        call = asyncio.create_task(mailbox.prefill(batch(1)))
        longest = 0.0
        while not call.done():
            before = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - before)
        await call
    assert longest < 0.1


async def test_agent_that_does_not_answer_in_time_is_killed() -> None:
    async with started(new_mailbox(Faults(decode_s=60), step_timeout_s=0.5)) as mailbox:
        await mailbox.prefill(batch(1))
        with pytest.raises(AgentDiedError, match=r"did not answer within 0\.5 s"):
            await mailbox.decode((CachedBatch(1, (1,), 0),))
        assert not mailbox.is_alive
        await until_alive(mailbox)
        assert (await mailbox.prefill(batch(1))).batch is not None, "batch 1 is unknown to the new agent"


async def test_deadline_of_warm_up_counts_from_graph_to_graph() -> None:
    async with started(new_mailbox(Faults(warm_up_s=0.5), step_timeout_s=1.0)) as mailbox:
        await mailbox.warm_up()


async def test_killed_agent_fails_the_calls_in_flight_and_those_that_wait() -> None:
    async with started(new_mailbox(Faults(prefill_s=60))) as mailbox:
        calls = [asyncio.create_task(mailbox.prefill(batch(id))) for id in (1, 2)]
        await asyncio.sleep(0)
        agents()[0].kill()
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert [type(outcome) for outcome in outcomes] == [AgentDiedError] * 2


async def test_death_between_calls_is_noticed_and_mended_without_a_call() -> None:
    async with started(new_mailbox(Faults())) as mailbox:
        assert mailbox.is_alive
        (first,) = agents()
        first.kill()
        await until(lambda: not mailbox.is_alive)
        await until_alive(mailbox)
        (second,) = agents()
        assert second.pid != first.pid
        assert (await mailbox.prefill(batch(1))).batch is not None


async def test_while_the_model_loads_again_steps_fail_and_nothing_is_live() -> None:
    async with started(new_mailbox(Faults(load_s=1.0))) as mailbox:
        agents()[0].kill()
        await until(lambda: not mailbox.is_alive)
        for call in (mailbox.prefill(batch(2)), mailbox.decode((CachedBatch(1, (1,), 0),)), mailbox.warm_up()):
            with pytest.raises(AgentDiedError, match="loaded again"):
                await call
        await mailbox.clear(1)
        await mailbox.clear(None)
        assert await mailbox.filter(1, (1,)) is None
        await until_alive(mailbox)


async def test_new_agent_is_warmed_up_if_the_old_one_was() -> None:
    steps: list[Progress] = []
    async with started(new_mailbox(Faults(), steps)) as mailbox:
        await mailbox.warm_up()
        steps.clear()
        agents()[0].kill()
        await until(lambda: not mailbox.is_alive)
        await until_alive(mailbox)
    assert [step.stage for step in steps] == ["loading"] * 2 + ["warming up"] * 3


async def test_three_deaths_in_a_row_are_the_end() -> None:
    async with started(new_mailbox(Faults(decode_error="the step failed"))) as mailbox:
        for _ in range(3):
            await until_alive(mailbox)
            await mailbox.prefill(batch(1))
            with pytest.raises(AgentDiedError):
                await mailbox.decode((CachedBatch(1, (1,), 0),))
        reason = await asyncio.wait_for(mailbox.failed, 5)
        assert "failed: RuntimeError in scripted.py" in reason


async def test_failed_step_fails_its_call_with_the_reason() -> None:
    async with started(new_mailbox(Faults(decode_error="the step failed"), step_ahead=False)) as mailbox:
        await mailbox.prefill(batch(1))
        with pytest.raises(AgentDiedError, match=r"Decode failed: RuntimeError in scripted\.py"):
            await mailbox.decode((CachedBatch(1, (1,), 0),))
        assert not mailbox.is_alive


async def test_a_step_between_deaths_starts_the_count_again() -> None:
    async with started(new_mailbox(Faults())) as mailbox:
        for number in range(4):
            await mailbox.prefill(batch(number))
            await mailbox.decode((CachedBatch(number, (number,), 0),))
            agents()[0].kill()
            await until(lambda: not mailbox.is_alive)
            await until_alive(mailbox)
        assert not mailbox.failed.done()


async def test_close_ends_an_agent_that_is_being_loaded_again() -> None:
    async with started(new_mailbox(Faults(load_s=2.0))) as mailbox:
        agents()[0].kill()
        await until(lambda: len(agents()) == 1 and not mailbox.is_alive)


async def test_failure_to_load_says_why() -> None:
    mailbox = new_mailbox(Faults(load_error="no such model"))
    with pytest.raises(AgentDiedError, match=r"^no such model$"):
        await mailbox.start()
    await mailbox.close()
    assert agents() == []


async def test_load_that_is_stuck_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpu_tgi_server.mailbox.process._run_agent", peers.silent)
    mailbox = new_mailbox(Faults(), load_timeout_s=0.5)
    with pytest.raises(AgentDiedError, match=r"did not answer within 0\.5 s and was killed"):
        await mailbox.start()
    await mailbox.close()
    assert agents() == []


async def test_second_load_that_is_stuck_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(new_mailbox(Faults())) as mailbox:
        (replica,) = mailbox._replicas
        stuck = replace(replica._settings, model_id=json.dumps({"load_s": 60}), load_timeout_s=0.1)
        monkeypatch.setattr(replica, "_settings", stuck)
        agents()[0].kill()
        reason = await asyncio.wait_for(mailbox.failed, 20)
        assert "did not answer within 0.1 s" in reason
        assert "3 agents have died in a row" in reason


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_close_ends_a_busy_agent(kind: str) -> None:
    faults = Faults(prefill_s=60) if kind == "prefill" else Faults(decode_s=60)
    async with started(new_mailbox(faults)) as mailbox:
        if kind == "prefill":
            call = asyncio.create_task(mailbox.prefill(batch(1)))
        else:
            await mailbox.prefill(batch(1))
            call = asyncio.create_task(mailbox.decode((CachedBatch(1, (1,), 0),)))
        await asyncio.sleep(0)
        await asyncio.wait_for(mailbox.close(), 8)
        with pytest.raises(AgentDiedError):
            await call


async def test_mailbox_that_was_never_started_refuses_calls() -> None:
    mailbox = new_mailbox(Faults())
    with pytest.raises(AgentDiedError):
        await mailbox.prefill(batch(1))
    assert not mailbox.is_alive
    await mailbox.close()


async def test_filter_and_clear_in_flight_survive_the_death_of_the_agent() -> None:
    """An error of either ends the batching task of TGI's routers."""
    async with started(new_mailbox(Faults())) as mailbox:
        await mailbox.prefill(batch(1))
        (agent,) = agents()
        agent.suspend()
        calls = [asyncio.create_task(mailbox.filter(1, (1,))), asyncio.create_task(mailbox.clear(1))]
        await asyncio.sleep(0.1)
        agent.kill()
        assert await asyncio.wait_for(asyncio.gather(*calls), 10) == [None, None]


async def test_stopped_agent_that_does_not_read_a_large_command_is_killed_in_time() -> None:
    async with started(new_mailbox(Faults(), step_timeout_s=1.5)) as mailbox:
        agents()[0].suspend()
        with pytest.raises(AgentDiedError, match=r"did not answer within 1\.5 s"):
            await asyncio.wait_for(mailbox.prefill(batch(1, "x" * 4_000_000)), 10)
        await until_alive(mailbox)


async def test_agent_that_cannot_be_replaced_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(new_mailbox(Faults())) as mailbox:

        def fail(*_arguments: object) -> None:
            raise OSError("no more processes")

        monkeypatch.setattr("tpu_tgi_server.mailbox.replica.AgentProcess", fail)
        agents()[0].kill()
        assert "no more processes" in await asyncio.wait_for(mailbox.failed, 10)
