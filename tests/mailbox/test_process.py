"""The root's end of one agent: deadlines, and how the agent's end is told."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.mailbox import peers
from tpu_tgi_server.config import Settings
from tpu_tgi_server.mailbox.messages import Progress
from tpu_tgi_server.mailbox.process import AgentDiedError, AgentProcess


@contextmanager
def agent_like(
    peer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, on_progress: Callable[[Progress], None] = print
) -> Iterator[AgentProcess]:
    monkeypatch.setattr("tpu_tgi_server.mailbox.process._run_agent", peer)
    agent = AgentProcess(Settings("model"), "no loader", on_progress)
    try:
        yield agent
    finally:
        agent.stop()


def test_deadline_counts_from_one_report_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Progress] = []
    deadline_s = 4 * peers.SLOW_STEP_S
    with agent_like(peers.slow, monkeypatch, reports.append) as agent:
        assert agent._connection.poll(60)
        with pytest.raises(AgentDiedError, match="did not answer within 2 s and was killed"):
            agent.receive(deadline_s)
    assert len(reports) == peers.NUM_REPORTS > 4


def test_end_of_an_agent_says_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        agent_like(peers.broken, monkeypatch) as agent,
        pytest.raises(AgentDiedError, match="the agent exited with status 3"),
    ):
        agent.receive(60)


def test_two_threads_that_wait_for_one_dead_agent_both_learn_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system tells a process's status once; whoever asks second must not take that for no answer."""
    ask = os.waitpid

    def ask_slowly(pid: int, options: int) -> tuple[int, int]:
        answer = ask(pid, options)
        time.sleep(0.5)
        return answer

    with agent_like(peers.silent, monkeypatch) as agent:
        monkeypatch.setattr("os.waitpid", ask_slowly)
        assert agent.pid is not None
        os.kill(agent.pid, 9)
        with ThreadPoolExecutor(2) as threads:
            ends = [threads.submit(agent._epitaph) for _ in range(2)]
        assert [end.result() for end in ends] == ["the agent was ended by signal 9"] * 2


def test_agent_that_was_stopped_may_be_stopped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with agent_like(peers.silent, monkeypatch) as agent:
        agent.stop()
        agent.stop()
        with pytest.raises(AgentDiedError):
            agent.receive(60)
