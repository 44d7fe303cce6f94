"""Continuous batching over the scripted model: batches, slots, waiting."""

from dataclasses import replace

import pytest

from tests.driver import batch_of, new_request
from tests.engine.scripted_driver import MAX_TOTAL_TOKENS, NUM_SLOTS, ScriptedDriver
from tests.scripted import ScriptedModel
from tests.tiny_model import byte_level_tokenizer
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import (
    LIVENESS_ID,
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    Limits,
    Request,
    Stopping,
)
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


def test_answer_follows_the_script_with_its_logprobs(driver: ScriptedDriver) -> None:
    request = new_request(1, "once upon a time", new=20)
    (answer,) = driver.run(1, request)
    assert len(answer.ids) == 20
    driver.check(request)


def test_prefill_runs_in_one_execution_and_decode_in_one_a_step(driver: ScriptedDriver) -> None:
    driver.run(1, *[new_request(id, f"prompt {id}", new=5) for id in range(4)])
    assert (driver.model.num_prefills, driver.model.num_decodes) == (1, 4)


def test_steps_are_of_no_more_slots_than_up_to_the_last_that_runs_and_the_first_free_one_is_used_again(
    driver: ScriptedDriver,
) -> None:
    requests = [new_request(id, f"prompt {id}", new=new) for id, new in enumerate((2, 6, 4))]
    running = batch_of(driver.prefill(10, *requests))
    running = batch_of(driver.decode(running))
    joining = new_request(3, "in the slot of the first", new=3)
    running = batch_of(driver.decode(running, batch_of(driver.prefill(11, joining))))
    driver.drain(running)
    assert driver.model.num_used_slots == [3, 3, 3, 2, 2]
    for request in (*requests, joining):
        driver.check(request)


def test_requests_that_join_step_together_with_those_that_run_also_when_steps_are_ahead() -> None:
    driver = ScriptedDriver(steps_ahead=True)
    requests = [new_request(id, f"prompt {id}", new=6) for id in range(2)]
    running = batch_of(driver.prefill(10, requests[0]))
    running = batch_of(driver.decode(running))
    assert driver.model.num_decodes == 2
    joining = batch_of(driver.prefill(11, requests[1]))
    assert driver.model.num_decodes == 2
    merged = batch_of(driver.decode(running, joining))
    assert [len(driver.answers[id].ids) for id in range(2)] == [3, 1]
    driver.drain(merged)
    assert driver.model.num_decodes == 7, "the first stepped alone twice, and the second took five tokens"
    for request in requests:
        driver.check(request)


def test_steps_ahead_of_a_batch_that_was_cleared_hold_nobody_up() -> None:
    driver = ScriptedDriver(steps_ahead=True)
    driver.clear(driver.prefill(10, new_request(0, "cleared", new=6)))
    driver.prefill(11, new_request(1, "next", new=6))
    assert driver.model.num_decodes == 2


def test_decode_merges_batches_under_the_first_id(driver: ScriptedDriver) -> None:
    requests = [new_request(id, f"prompt {id}", new=6) for id in range(4)]
    old = batch_of(driver.prefill(10, *requests[:2]))
    new = batch_of(driver.prefill(11, *requests[2:]))
    merged = batch_of(driver.decode(old, new))
    assert (merged.id, list(merged.request_ids)) == (10, [0, 1, 2, 3])
    with pytest.raises(EngineError, match="11"):
        driver.decode(new)
    driver.drain(merged)
    for request in requests:
        driver.check(request)


def test_parked_batches_keep_their_state(driver: ScriptedDriver) -> None:
    """Two batches take turns, and one of them rests for many steps."""
    requests = [new_request(id, f"prompt {id}", new=30) for id in range(3)]
    parked = batch_of(driver.prefill(1, requests[0]))
    running = batch_of(driver.prefill(2, *requests[1:]))
    for _ in range(9):
        running = batch_of(driver.decode(running))
    parked = batch_of(driver.decode(parked))
    assert [len(driver.answers[id].ids) for id in range(3)] == [2, 10, 10]
    driver.drain(driver.decode(running, parked))
    for request in requests:
        driver.check(request)
        assert len(driver.answers[request.id].ids) == 30


def test_max_tokens_is_a_full_slot_a_request(driver: ScriptedDriver) -> None:
    batch = batch_of(driver.prefill(1, new_request(1, "a"), new_request(2, "b")))
    assert batch.max_tokens == 2 * MAX_TOTAL_TOKENS


def test_filter_touches_only_the_batch_it_names(driver: ScriptedDriver) -> None:
    running = batch_of(driver.prefill(1, new_request(10, "running")))
    fresh = batch_of(driver.prefill(2, new_request(11, "stays"), new_request(12, "goes")))
    kept = batch_of(driver.filter(fresh, [11]))
    merged = batch_of(driver.decode(running, kept))
    assert list(merged.request_ids) == [10, 11]
    assert [len(driver.answers[id].ids) for id in (10, 11, 12)] == [2, 2, 1]


def test_filter_frees_the_slots_of_dropped_requests(driver: ScriptedDriver) -> None:
    batch = batch_of(driver.prefill(1, *[new_request(id, "full", new=9) for id in range(NUM_SLOTS)]))
    driver.filter(batch, [0, 3])
    joining = [new_request(id, "joins") for id in (20, 21)]
    driver.prefill(2, *joining)
    assert [len(driver.answers[request.id].ids) for request in joining] == [1, 1]


@pytest.mark.parametrize("kept_ids", [[], [99]], ids=["none", "unknown"])
def test_filter_to_nothing_ends_the_batch(driver: ScriptedDriver, kept_ids: list[int]) -> None:
    batch = batch_of(driver.prefill(1, new_request(1, "a"), new_request(2, "b")))
    assert driver.filter(batch, kept_ids) is None
    with pytest.raises(EngineError) as refusal:
        driver.decode(batch)
    assert refusal.value.kind is ErrorKind.UNKNOWN_BATCH
    driver.check_all_slots_free()


def test_filter_of_an_unknown_batch_does_nothing(driver: ScriptedDriver) -> None:
    running = batch_of(driver.prefill(1, new_request(1, "a", new=5)))
    assert driver.generator.filter(77, (1,)) is None
    driver.drain(running)
    assert len(driver.answers[1].ids) == 5


def test_filter_does_not_keep_requests_of_other_batches(driver: ScriptedDriver) -> None:
    driver.prefill(1, new_request(1, "a"))
    driver.prefill(2, new_request(2, "b"))
    assert driver.generator.filter(2, (1,)) is None
    assert driver.generator.filter(1, (1, 2)) == CachedBatch(1, (1,), MAX_TOTAL_TOKENS)


def test_clear_frees_only_the_batch_it_names(driver: ScriptedDriver) -> None:
    running = batch_of(driver.prefill(1, new_request(1, "runs on", new=9)))
    cleared = batch_of(driver.prefill(41, *[new_request(id, "cancelled") for id in (2, 3, 4)]))
    driver.clear(cleared)
    joined = batch_of(driver.prefill(2, *[new_request(id, "joins", new=3) for id in (5, 6, 7)]))
    assert [len(driver.answers[id].ids) for id in (5, 6, 7)] == [1, 1, 1]
    driver.drain(driver.decode(running, joined))
    assert len(driver.answers[1].ids) == 9


def test_clear_of_an_unknown_batch_does_nothing(driver: ScriptedDriver) -> None:
    running = batch_of(driver.prefill(1, new_request(1, "a", new=5)))
    driver.generator.clear(99)
    driver.drain(running)
    assert len(driver.answers[1].ids) == 5


def test_clear_without_an_id_drops_everything(driver: ScriptedDriver) -> None:
    batches = [batch_of(driver.prefill(id, new_request(id, "a"), new_request(id + 10, "b"))) for id in (1, 2)]
    waiting = batch_of(driver.prefill(3, new_request(3, "waits")))
    driver.clear()
    for batch in (*batches, waiting):
        with pytest.raises(EngineError):
            driver.decode(batch)
    driver.check_all_slots_free()


@pytest.mark.parametrize("known_first", [True, False])
def test_decode_of_an_unknown_batch_is_refused_and_changes_nothing(driver: ScriptedDriver, known_first: bool) -> None:
    running = batch_of(driver.prefill(1, new_request(1, "a", new=5)))
    unknown = pb.CachedBatch(id=2, request_ids=[7], size=1)
    with pytest.raises(EngineError) as refusal:
        driver.decode(*((running, unknown) if known_first else (unknown, running)))
    assert refusal.value.kind is ErrorKind.UNKNOWN_BATCH
    driver.drain(running)
    assert len(driver.answers[1].ids) == 5


def test_decode_without_batches_is_refused(driver: ScriptedDriver) -> None:
    with pytest.raises(EngineError) as refusal:
        driver.generator.decode(())
    assert refusal.value.kind is ErrorKind.INVALID


def test_decode_frees_the_slot_of_a_request_that_is_not_named(driver: ScriptedDriver) -> None:
    batch = batch_of(driver.prefill(1, *[new_request(id, "full", new=9) for id in range(NUM_SLOTS)]))
    batch.request_ids.remove(2)
    batch.size -= 1
    batch = batch_of(driver.decode(batch))
    joined = batch_of(driver.prefill(2, new_request(9, "joins", new=9)))
    assert len(driver.answers[9].ids) == 1
    driver.drain(driver.decode(batch, joined))
    assert [len(driver.answers[id].ids) for id in (0, 1, 2, 3, 9)] == [9, 9, 1, 9, 9]


def test_more_requests_than_slots_wait_in_arrival_order(driver: ScriptedDriver) -> None:
    requests = [new_request(id, f"prompt {id}", new=3) for id in range(NUM_SLOTS + 3)]
    batch = batch_of(driver.prefill(1, *requests))
    assert [len(driver.answers[id].ids) for id in range(7)] == [1, 1, 1, 1, 0, 0, 0]
    batch = batch_of(driver.decode(batch))
    batch = batch_of(driver.decode(batch))
    assert [len(driver.answers[id].ids) for id in range(7)] == [3, 3, 3, 3, 1, 1, 1]
    driver.drain(batch)
    for request in requests:
        driver.check(request)


def test_requests_of_one_token_pass_through_few_slots_in_one_prefill() -> None:
    driver = ScriptedDriver(num_slots=2)
    requests = [new_request(id, f"prompt {id}", new=1) for id in range(5)]
    assert driver.prefill(1, *requests) is None
    for request in requests:
        driver.check(request)


def test_no_slot_is_stolen_from_an_earlier_waiter(driver: ScriptedDriver) -> None:
    """A slot frees while a request of batch 2 waits; batch 3 comes later and must not get it."""
    first = batch_of(driver.prefill(1, *[new_request(id, "full", new=9) for id in range(NUM_SLOTS)]))
    early = batch_of(driver.prefill(2, new_request(20, "early", new=2)))
    first = batch_of(driver.filter(first, [0, 1, 2]))
    late = batch_of(driver.prefill(3, new_request(30, "late", new=2)))
    assert (driver.answers[20].ids, driver.answers[30].ids) == ([], [])
    late = batch_of(driver.decode(late))
    assert driver.answers[30].ids == []
    early = batch_of(driver.decode(early))
    assert len(driver.answers[20].ids) == 1
    driver.drain(driver.decode(first, early, late))
    assert [len(driver.answers[id].ids) for id in (0, 20, 30)] == [9, 2, 2]


def test_waiting_requests_can_be_dropped(driver: ScriptedDriver) -> None:
    full = batch_of(driver.prefill(1, *[new_request(id, "full", new=3) for id in range(NUM_SLOTS)]))
    waiting = batch_of(driver.prefill(2, *[new_request(id, "waits", new=3) for id in (10, 11, 12)]))
    waiting = batch_of(driver.filter(waiting, [10, 12]))
    waiting.request_ids.remove(10)
    waiting.size = 1
    driver.drain(driver.decode(full, waiting))
    assert [len(driver.answers[id].ids) for id in (10, 11, 12)] == [0, 0, 3]


def test_liveness_probe_is_answered_and_nothing_of_it_is_kept(driver: ScriptedDriver) -> None:
    assert driver.prefill(LIVENESS_ID, new_request(LIVENESS_ID, "liveness", new=1)) is None
    assert driver.answers[LIVENESS_ID].end is not None
    driver.answers.clear()
    driver.check_all_slots_free()


def test_liveness_probe_does_not_wait_for_a_slot(driver: ScriptedDriver) -> None:
    requests = [new_request(id, f"prompt {id}", new=9) for id in range(NUM_SLOTS + 1)]
    batch = batch_of(driver.prefill(1, *requests))
    for _ in range(3):
        driver.answers.pop(LIVENESS_ID, None)
        assert driver.prefill(LIVENESS_ID, new_request(LIVENESS_ID, "a longer liveness probe", new=1)) is None
        assert driver.answers[LIVENESS_ID].end is not None
        batch = batch_of(driver.decode(batch))
    driver.drain(batch)
    for request in requests:
        driver.check(request)
        assert len(driver.answers[request.id].ids) == 9


def test_liveness_probe_of_several_tokens_leaves_nothing_behind(driver: ScriptedDriver) -> None:
    probe = Batch(LIVENESS_ID, (Request(LIVENESS_ID, "liveness", Stopping(max_new_tokens=10)),))
    for _ in range(2):
        result = driver.generator.prefill(probe)
        assert (len(result.generations), result.batch) == (1, None)
    driver.check_all_slots_free()


@pytest.mark.parametrize("truncate", [0, 1, 10])
def test_liveness_probe_fits_the_shortest_prompts(truncate: int) -> None:
    """TGI's v2 router truncates it to 10 tokens, whatever the longest prompt is."""
    limits = Limits(num_slots=2, max_input_tokens=1, max_total_tokens=2)
    generator = Generator(ScriptedModel(limits), Tokenizer(byte_level_tokenizer()), limits)
    probe = Request(LIVENESS_ID, "liveness", Stopping(1), truncate=truncate)
    result = generator.prefill(Batch(LIVENESS_ID, (probe,)))
    assert (len(result.generations), result.batch) == (1, None)
    with pytest.raises(EngineError, match="--max-input-tokens 1"):
        generator.prefill(Batch(1, (replace(probe, id=1, truncate=10),)))


def test_one_prefill_may_mix_requests_that_end_and_that_go_on(driver: ScriptedDriver) -> None:
    requests = [new_request(id, f"prompt {id}", new=new) for id, new in enumerate((1, 5, 1, 5))]
    batch = batch_of(driver.prefill(1, *requests))
    assert list(batch.request_ids) == [1, 3]
    driver.drain(batch)
    assert [len(driver.answers[id].ids) for id in range(4)] == [1, 5, 1, 5]


def test_full_slot_ends_with_length(driver: ScriptedDriver) -> None:
    """A prompt of 250 tokens leaves room for 6 of 256."""
    request = new_request(1, "z" * 249, new=20)
    (answer,) = driver.run(1, request)
    driver.check(request)
    assert answer.end is not None
    assert (len(answer.ids), answer.end.finish_reason) == (6, pb.FINISH_REASON_LENGTH)


def test_prompts_beyond_one_prefill_run_in_several() -> None:
    driver = ScriptedDriver(max_prefill_tokens=20)
    requests = [new_request(id, "z" * length, new=3) for id, length in enumerate((11, 11, 3, 19))]
    driver.run(1, *requests)
    assert driver.model.num_prefills == 3
    for request in requests:
        driver.check(request)


def test_no_request_is_live_after_warm_up(driver: ScriptedDriver) -> None:
    graphs = []
    driver.generator.warm_up(lambda graph, number, total: graphs.append((str(graph), number, total)))
    assert graphs == [(f"decode {number} greedy", number, 3) for number in (1, 2, 3)]
    driver.check_all_slots_free()
