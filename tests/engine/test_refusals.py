"""What the generator refuses: each for its own request alone, with the name of the field."""

from math import inf, nan
from typing import Any

import pytest

from tests.driver import batch_of, new_request
from tests.engine.scripted_driver import MAX_TOTAL_TOKENS, NUM_SLOTS, ScriptedDriver
from tests.scripted import ScriptedModel
from tests.tiny_model import byte_level_tokenizer
from tpu_tgi_server.config import MAX_CHUNK_TOKENS
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import (
    Batch,
    EngineError,
    ErrorKind,
    GrammarType,
    Limits,
    Request,
    Sampling,
    Stopping,
)
from tpu_tgi_server.engine.validation import MAX_DETAILS_BYTES, check_details, details_bytes
from tpu_tgi_server.model.interface import OnGraph


def test_warm_up_is_refused_while_a_request_is_live(driver: ScriptedDriver) -> None:
    running = batch_of(driver.prefill(1, new_request(1, "a", new=5)))
    with pytest.raises(EngineError) as refusal:
        driver.generator.warm_up(lambda *_: None)
    assert refusal.value.kind is ErrorKind.BUSY
    driver.drain(running)
    driver.check_all_slots_free()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("temperature", {"sampling": Sampling(temperature=-0.5)}),
        ("top_p", {"sampling": Sampling(top_p=1.1)}),
        ("typical_p", {"sampling": Sampling(typical_p=nan)}),
        ("repetition_penalty", {"sampling": Sampling(repetition_penalty=inf)}),
        ("frequency_penalty", {"sampling": Sampling(frequency_penalty=nan)}),
        ("grammar", {"sampling": Sampling(grammar="(", grammar_type=GrammarType.REGEX)}),
        ("grammar", {"sampling": Sampling(grammar="[0-9]")}),
        ("max_new_tokens", {"stopping": Stopping(0)}),
        ("top_n_tokens", {"top_n_tokens": 65}),
        ("inputs", {"inputs": "z" * 256}),
    ],
)
def test_refusal_names_the_field_and_admits_nothing(driver: ScriptedDriver, field: str, fields: dict[str, Any]) -> None:
    good = Request(1, "good", Stopping(5))
    bad = Request(**{"id": 2, "inputs": "bad", "stopping": Stopping(5), **fields})
    with pytest.raises(EngineError, match=f"request 2: {field}") as refusal:
        driver.generator.prefill(Batch(1, (good, bad)))
    assert refusal.value.kind is ErrorKind.INVALID
    assert driver.generator.filter(1, (1, 2)) is None
    driver.check_all_slots_free()


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0, top_p=0, typical_p=0, repetition_penalty=0), Sampling(top_k=50, seed=7)],
    ids=["defaults", "zeros", "top_k alone"],
)
def test_neutral_values_are_greedy(driver: ScriptedDriver, sampling: Sampling) -> None:
    result = driver.generator.prefill(Batch(1, (Request(1, "a", Stopping(1), sampling),)))
    greedy = new_request(2, "a", new=1)
    (answer,) = driver.run(2, greedy)
    (generation,) = result.generations
    assert list(generation.tokens.ids) == answer.ids
    assert generation.generated_text is not None
    assert generation.generated_text.seed is None


def test_token_that_the_model_lacks_is_refused() -> None:
    limits = Limits(NUM_SLOTS, MAX_TOTAL_TOKENS - 1, MAX_TOTAL_TOKENS)
    model = ScriptedModel(limits)
    tokenizer = Tokenizer(byte_level_tokenizer())
    model.vocab_size = max(tokenizer.encode("good", 0, None))
    generator = Generator(model, tokenizer, limits)
    with pytest.raises(EngineError, match=f"request 1: inputs has token {model.vocab_size}") as refusal:
        generator.prefill(Batch(1, (Request(1, "good", Stopping(5)),)))
    assert refusal.value.kind is ErrorKind.INVALID


def test_duplicate_ids_are_refused(driver: ScriptedDriver) -> None:
    running = batch_of(driver.prefill(1, new_request(1, "a", new=5)))
    refused = [
        Batch(2, (Request(7, "x", Stopping(2)), Request(7, "y", Stopping(2)))),
        Batch(2, (Request(1, "x", Stopping(2)),)),
        Batch(1, (Request(8, "x", Stopping(2)),)),
        Batch(2, ()),
    ]
    for batch in refused:
        with pytest.raises(EngineError) as refusal:
            driver.generator.prefill(batch)
        assert refusal.value.kind is ErrorKind.INVALID
    driver.drain(running)
    assert len(driver.answers[1].ids) == 5
    driver.check_all_slots_free()


def test_prompt_details_of_one_call_stay_within_a_response() -> None:
    """However many prompts one call prefills, together they have no more tokens than the largest chunk."""
    longest = Request(1, "x" * 10**6, Stopping(1), prefill_logprobs=True)
    assert details_bytes(longest, MAX_CHUNK_TOKENS) <= MAX_DETAILS_BYTES


def test_prompt_details_that_no_response_holds_are_refused() -> None:
    request = Request(1, "x" * 10**6, Stopping(1), prefill_logprobs=True)
    with pytest.raises(EngineError, match="request 1: prefill_logprobs of 100000 tokens is more than"):
        check_details(request, 100_000)
    check_details(request, 10_000)


def test_warm_up_that_runs_out_of_memory_says_which_flags_to_change(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(_on_graph: OnGraph) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

    monkeypatch.setattr(driver.model, "warm_up", run_out)
    with pytest.raises(EngineError, match="lower --max-batch-size") as refusal:
        driver.generator.warm_up(lambda *_: None)
    assert refusal.value.kind is ErrorKind.TOO_LARGE
    driver.check_all_slots_free()
