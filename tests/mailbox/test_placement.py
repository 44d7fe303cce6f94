"""Which agent holds which request: placing, merging, leaving, and beginning anew after a death."""

import random

import pytest

from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    FinishReason,
    GeneratedText,
    Generation,
    Request,
    Stopping,
    Tokens,
)
from tpu_tgi_server.mailbox.placement import Part, Placement

MAX_TOTAL_TOKENS = 64


def request(request_id: int, new: int = 9) -> Request:
    return Request(request_id, "prompt", Stopping(new))


def generation(request_id: int, *ids: int, is_end: bool = False) -> Generation:
    """Tokens with texts that tell them apart."""
    n = len(ids)
    texts = tuple(f"<{id}>" for id in ids)
    end = GeneratedText("text", 99, FinishReason.EOS_TOKEN) if is_end else None
    details = tuple(Tokens((id,), (0.0,), ("",), (False,)) for id in ids)
    return Generation(request_id, Tokens(ids, (0.5,) * n, texts, (False,) * n), None, end, details)


def enter(placement: Placement, batch_id: int, request_ids: list[int], agents: list[int]) -> list[Part]:
    """Add a batch; the part of each request, in their order."""
    batch = Batch(batch_id, tuple(map(request, request_ids)))
    parts = placement.split(batch.requests, agents)
    placement.add(batch, parts)
    part_of = {member.id: part for part, members in parts.items() for member in members}
    return [part_of[id] for id in request_ids]


def test_requests_go_to_the_agent_with_the_most_free_slots() -> None:
    placement = Placement([2, 4], MAX_TOTAL_TOKENS)
    agents = [part.agent for part in enter(placement, 1, [1, 2, 3, 4, 5, 6], [0, 1])]
    assert agents == [1, 1, 0, 1, 0, 1]


def test_waiting_requests_count_like_running_ones() -> None:
    placement = Placement([1, 1], MAX_TOTAL_TOKENS)
    assert [part.agent for part in enter(placement, 1, [1, 2, 3, 4], [0, 1])] == [0, 1, 0, 1]


def test_requests_that_left_make_room() -> None:
    placement = Placement([2, 2], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1, 2, 3, 4], [0, 1])
    placement.keep(1, [2, 4])
    assert [part.agent for part in enter(placement, 2, [5, 6], [0, 1])] == [0, 0]


def test_agents_that_are_not_there_get_nothing() -> None:
    placement = Placement([9, 1], MAX_TOTAL_TOKENS)
    assert {part.agent for part in enter(placement, 1, [1, 2, 3], [1])} == {1}


def test_requests_that_may_not_wait_are_left_out_when_all_slots_are_taken() -> None:
    placement = Placement([1, 2], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1], [0])
    parts = placement.split(map(request, (2, 3, 4)), [0, 1], may_wait=False)
    assert [(part.agent, [member.id for member in members]) for part, members in parts.items()] == [(1, [2, 3])]


def test_id_that_lives_on_another_agent_is_refused() -> None:
    placement = Placement([1, 1], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1], [0])
    for batch in (Batch(2, (request(1),)), Batch(1, (request(2),)), Batch(3, (request(3), request(3))), Batch(4, ())):
        with pytest.raises(EngineError) as refusal:
            placement.check(batch)
        assert refusal.value.kind is ErrorKind.INVALID
    placement.check(Batch(2, (request(2),)))


def test_merge_names_every_part_also_those_whose_requests_are_gone() -> None:
    placement = Placement([2, 2], MAX_TOTAL_TOKENS)
    first, second = enter(placement, 1, [1, 2], [0, 1])
    third, fourth = enter(placement, 2, [3, 4], [0, 1])
    held = placement.merge([CachedBatch(1, (1,), 0), CachedBatch(2, (3, 4), 0)])
    assert held == {first: [1], second: [], third: [3], fourth: [4]}
    assert placement.cached_batch(1) == CachedBatch(1, (1, 3, 4), 3 * MAX_TOTAL_TOKENS)
    assert 2 not in placement


def test_unknown_batch_is_refused_and_nothing_changes() -> None:
    placement = Placement([2], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1], [0])
    with pytest.raises(EngineError, match="batch 7 is not known"):
        placement.merge([CachedBatch(1, (), 0), CachedBatch(7, (), 0)])
    assert placement.cached_batch(1) == CachedBatch(1, (1,), MAX_TOTAL_TOKENS)


def moved(placement: Placement, batch_id: int, agents: list[int]) -> list[int]:
    """The ids of the requests that move now."""
    homeless = placement.homeless(batch_id)
    for part, members in placement.split(homeless, agents).items():
        placement.move(part, members)
    return [member.id for member in homeless]


def test_moved_request_goes_on_where_it_was_whatever_the_borders_of_its_steps() -> None:
    placement = Placement([2, 2], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1, 2], [0, 1])
    placement.take(1, [generation(1, 10), generation(2, 20)])
    placement.take(1, [generation(1, 11, 12)])
    placement.evict(0)
    assert moved(placement, 1, [1]) == [1]
    assert placement.take(1, [generation(1, 10, 11)]) == []
    assert placement.take(1, [generation(1, 12, 13, 14)]) == [generation(1, 13, 14)]
    assert placement.take(1, [generation(1, 15, is_end=True)]) == [generation(1, 15, is_end=True)]
    assert placement.cached_batch(1) == CachedBatch(1, (2,), MAX_TOTAL_TOKENS)


def test_details_of_the_prompt_are_told_once() -> None:
    placement = Placement([1, 1], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1], [0])
    first = generation(1, 10)._replace(prefill_tokens=Tokens((1,), (0.0,), ("p",), (False,)))
    assert placement.take(1, [first]) == [first]
    placement.evict(0)
    moved(placement, 1, [1])
    (again,) = placement.take(1, [generation(1, 10, 11)._replace(prefill_tokens=first.prefill_tokens)])
    assert again == generation(1, 11)


@pytest.mark.parametrize("brought", [(10,), (10, 11)], ids=["nothing new", "something new"])
def test_request_that_brings_nothing_new_between_three_deaths_is_stuck(brought: tuple[int, ...]) -> None:
    placement = Placement([1, 1, 1], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1], [0])
    placement.take(1, [generation(1, 10)])
    for agent in (0, 1):
        placement.evict(agent)
        assert not placement.is_stuck(1)
        moved(placement, 1, [agent + 1])
        placement.take(1, [generation(1, *brought)])
    placement.evict(2)
    assert placement.is_stuck(1) == (brought == (10,))


@pytest.mark.parametrize(
    "again",
    [generation(1, 10, 99), generation(1, 10, is_end=True)],
    ids=["another token", "an end where there was none"],
)
def test_request_that_cannot_be_repeated_ends_with_what_it_has(again: Generation) -> None:
    placement = Placement([1, 1], MAX_TOTAL_TOKENS)
    enter(placement, 1, [1], [0])
    placement.take(1, [generation(1, 10, 11, 12)])
    placement.evict(0)
    moved(placement, 1, [1])
    (end,) = placement.take(1, [again])
    assert end.tokens == Tokens((12,), (0.0,), ("",), (True,))
    assert end.generated_text == GeneratedText("<10><11><12>", 4, FinishReason.LENGTH)
    assert 1 not in placement


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_told_its_tokens_once_and_in_order_whatever_happens(seed: int) -> None:
    """Agents are simulated: each brings the tokens 0, 1, 2, ... of its requests; any may die at any time."""
    chance = random.Random(seed)
    num_agents = chance.randint(1, 4)
    placement = Placement([chance.randint(1, 3) for _ in range(num_agents)], MAX_TOTAL_TOKENS)
    agents = list(range(num_agents))
    lens = {id: chance.randint(1, 12) for id in range(40)}
    waiting = list(lens)
    at: dict[int, int] = {}  # how far the agent is that has a request
    told: dict[int, list[int]] = {id: [] for id in lens}
    live: CachedBatch | None = None
    for turn in range(400):
        batches = [live] if live else []
        if waiting and chance.random() < 0.3:
            new = [waiting.pop(0) for _ in range(min(len(waiting), chance.randint(1, 3)))]
            enter(placement, turn, new, agents)
            at.update(dict.fromkeys(new, 0))
            batches.append(CachedBatch(turn, tuple(new), 0))
        if not batches:
            continue
        held = placement.merge(batches)
        batch_id = batches[0].id
        for agent in agents:
            placement.join([part for part in held if part.agent == agent])
        if chance.random() < 0.1:
            placement.evict(chance.choice(agents))
        brought = [step(at, lens, id, chance.randint(1, 3)) for ids in held.values() for id in ids]
        for new_tokens in placement.take(batch_id, brought):
            told[new_tokens.request_id] += new_tokens.tokens.ids
        at.update(dict.fromkeys(moved(placement, batch_id, agents), 0))
        live = placement.cached_batch(batch_id)
    assert told == {id: list(range(num_tokens)) for id, num_tokens in lens.items()}
    assert live is None
    assert not placement._residents


def step(at: dict[int, int], lens: dict[int, int], request_id: int, num_steps: int) -> Generation:
    """The next tokens of a simulated agent."""
    start = at[request_id]
    at[request_id] = min(start + num_steps, lens[request_id])
    return generation(request_id, *range(start, at[request_id]), is_end=at[request_id] == lens[request_id])
