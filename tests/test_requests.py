"""Everything that a request can ask for, through the real server, on plain torch and on XLA.

What transformers can do too is compared with transformers; the rest with the same request alone.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import count, product
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.driver import Answer, Driver, new_request
from tests.reference import encode, greedy_reference, prompt_of_len
from tests.servers import ready_server, start_model_server
from tests.tiny_model import BOS, VOCAB_SIZE
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

PROMPT = prompt_of_len(20)
LONG_PROMPT = prompt_of_len(45)
NEW = 12
SAMPLED = {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95}

ids = count(1)


@pytest.fixture(scope="module", params=["cpu", "xla-cpu"])
def stub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    options = ["--device", request.param, "--max-total-tokens", "128", "--max-input-tokens", "64"]
    with ready_server(start_model_server(folder, model, *options)) as server, server.connect() as stub:
        yield stub


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Path:
    return tiny_model_folder


def ask(stub: Any, prompt: str = PROMPT, new: int = NEW, **fields: Any) -> Answer:
    """The answer to a request that is alone."""
    (answer,) = Driver(stub).run(next(ids), new_request(next(ids), prompt, new=new, **fields))
    return answer


def ask_together(stub: Any, *requests: pb.Request) -> list[Answer]:
    return Driver(stub).run(next(ids), *requests)


@cache
def logprobs_of(folder: Path, token_ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """transformers' log-probabilities [T, V] after each of the tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logprobs: np.ndarray[Any, Any] = torch.log_softmax(model(torch.tensor([token_ids])).logits[0], -1).numpy()
        return logprobs


@cache
def penalised_reference(folder: Path, prompt: str, penalty: float) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompt_ids = torch.tensor([encode(prompt)])
    output = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=NEW,
        do_sample=False,
        repetition_penalty=penalty,
    )
    new_ids: list[int] = output[0, prompt_ids.shape[1] :].tolist()
    return new_ids


@pytest.mark.parametrize("penalty", [0.7, 1.5])
def test_repetition_penalty_counts_prompt_and_output_and_nothing_else(stub: Any, model: Path, penalty: float) -> None:
    asked = {"repetition_penalty": penalty}
    requests = [
        new_request(next(ids), PROMPT, new=NEW, parameters=asked),
        new_request(next(ids), LONG_PROMPT, new=NEW),
        new_request(next(ids), LONG_PROMPT, new=NEW, parameters=asked),
    ]
    first, plain, last = ask_together(stub, *requests)
    assert first.ids == penalised_reference(model, PROMPT, penalty)
    assert last.ids == penalised_reference(model, LONG_PROMPT, penalty)
    assert tuple(plain.ids) == greedy_reference(model, LONG_PROMPT).ids[:NEW]


def test_frequency_penalty_falls_on_frequent_tokens_and_not_on_neighbours(stub: Any, model: Path) -> None:
    penalised, plain = ask_together(
        stub,
        new_request(next(ids), PROMPT, new=NEW, parameters={"frequency_penalty": 40.0}),
        new_request(next(ids), PROMPT, new=NEW),
    )
    history = list(encode(PROMPT))
    for token in penalised.ids:
        scores = logprobs_of(model, tuple(history))[-1].copy()
        for seen in set(history):
            scores[seen] -= 40.0 * history.count(seen) / len(history)
        assert token == int(scores.argmax())
        history.append(token)
    assert tuple(plain.ids) == greedy_reference(model, PROMPT).ids[:NEW]
    assert penalised.ids != plain.ids


def test_neutral_values_are_as_good_as_none(stub: Any, model: Path) -> None:
    zeros = dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), 0.0)
    for parameters in ({}, zeros, {"frequency_penalty": 0.0, "top_k": 50, "seed": 3}):
        answer = ask(stub, parameters=parameters)
        assert tuple(answer.ids) == greedy_reference(model, PROMPT).ids[:NEW]
        assert answer.end is not None
        assert not answer.end.HasField("seed")


@pytest.mark.parametrize(
    "parameters", [{"temperature": 0.7}, {"top_p": 0.9}, {"typical_p": 0.9}, {"do_sample": True}], ids=str
)
def test_each_of_these_makes_a_request_sampled(stub: Any, parameters: dict[str, Any]) -> None:
    answer = ask(stub, parameters={**parameters, "seed": 2**64 - 1})
    assert answer.end is not None
    assert answer.end.seed == 2**64 - 1


def test_every_combination_of_filters_is_served(stub: Any) -> None:
    combinations = list(product([False, True], [0, 1, VOCAB_SIZE, 10**6], [1.0, 1e-6, 0.5], [1.0, 0.2]))
    requests = [
        new_request(
            next(ids),
            PROMPT,
            new=2,
            parameters={"do_sample": sample, "top_k": top_k, "top_p": top_p, "typical_p": typical_p},
        )
        for sample, top_k, top_p, typical_p in combinations
    ]
    for answer in ask_together(stub, *requests):
        assert len(answer.ids) == 2
        assert np.isfinite(answer.logprobs).all()


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 3e38, "frequency_penalty": 3e38},
        {"temperature": 1e-45, "top_p": 1e-45, "typical_p": 1e-45, "top_k": 2**32 - 1},
        {"temperature": 3e38},
    ],
    ids=str,
)
def test_extreme_values_are_served_also_under_a_grammar(stub: Any, extreme: dict[str, Any]) -> None:
    grammar = {"grammar": "[a-z ]{4}", "grammar_type": pb.GRAMMAR_TYPE_REGEX}
    for parameters in (extreme, {**extreme, "do_sample": True}):
        answer = ask(stub, PROMPT + "abcdefghijklmnopqrstuvwxyz", parameters={**parameters, **grammar})
        assert answer.end is not None
        assert re.fullmatch("[a-z ]{4}", answer.end.text)
        assert len(ask(stub, parameters=parameters).ids) == NEW


def test_top_k_of_one_takes_the_best_token(stub: Any, model: Path) -> None:
    answer = ask(stub, parameters={"do_sample": True, "top_k": 1, "temperature": 5.0, "seed": 9})
    assert tuple(answer.ids) == greedy_reference(model, PROMPT).ids[:NEW]


def test_seeds_are_reproducible_alone_batched_and_joined(stub: Any) -> None:
    seeded = {**SAMPLED, "seed": 1234567}
    alone = ask(stub, parameters=seeded).ids
    assert ask(stub, parameters=seeded).ids == alone
    others = [new_request(next(ids), LONG_PROMPT, new=NEW, parameters={**SAMPLED, "seed": n}) for n in range(2)]
    assert ask_together(stub, *others, new_request(next(ids), PROMPT, new=NEW, parameters=seeded))[2].ids == alone
    for step in (1, 5, 9):
        driver = Driver(stub)
        running = driver.prefill(next(ids), request := new_request(next(ids), PROMPT, new=NEW, parameters=seeded))
        for _ in range(step):
            assert running is not None
            running = driver.decode(running)
        joining = driver.prefill(next(ids), new_request(next(ids), LONG_PROMPT, new=3, parameters=SAMPLED))
        assert running is not None
        assert joining is not None
        driver.drain(driver.decode(running, joining))
        assert driver.answers[request.id].ids == alone


def test_the_whole_range_of_seeds_is_served_and_differs(stub: Any) -> None:
    seeds = [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    requests = [new_request(next(ids), PROMPT, new=NEW, parameters={**SAMPLED, "seed": seed}) for seed in seeds]
    answers = ask_together(stub, *requests)
    assert len({tuple(answer.ids) for answer in answers}) == len(seeds)
    assert [answer.end.seed for answer in answers if answer.end] == seeds


def test_a_slot_changes_freely_between_greedy_and_sampled(stub: Any) -> None:
    first = ask(stub).ids
    sampled = {tuple(ask(stub, parameters={**SAMPLED, "seed": seed}, new=5).ids) for seed in range(5)}
    assert len(sampled) > 1
    assert ask(stub).ids == first


def test_logprobs_are_raw_whatever_is_asked(stub: Any, model: Path) -> None:
    asked = {**SAMPLED, "temperature": 0.3, "repetition_penalty": 1.4, "seed": 5}
    answer = ask(stub, parameters=asked, top_n_tokens=3)
    expected = logprobs_of(model, (*encode(PROMPT), *answer.ids))
    for number, (token, logprob, top) in enumerate(zip(answer.ids, answer.logprobs, answer.top_tokens, strict=True)):
        row = expected[len(encode(PROMPT)) - 1 + number]
        assert logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row)[:3]
        assert list(top.ids) == best.tolist()
        assert list(top.logprobs) == pytest.approx(row[best], abs=1e-4)


def test_top_tokens_of_each_request_are_as_many_as_it_asks(stub: Any) -> None:
    numbers = (0, 1, 5, 64)
    requests = [new_request(next(ids), PROMPT, new=2, top_n_tokens=number) for number in numbers]
    for number, answer in zip(numbers, ask_together(stub, *requests), strict=True):
        assert [len(top.ids) for top in answer.top_tokens] == ([number] * 2 if number else [])
        for top, token, logprob in zip(answer.top_tokens, answer.ids, answer.logprobs, strict=False):
            assert (top.ids[0], top.logprobs[0]) == (token, logprob)
            assert len(top.texts) == len(top.is_special) == len(top.ids)
            assert all(value <= 0 for value in top.logprobs)


@pytest.mark.parametrize("truncate", [0, 7])
def test_prefill_logprobs_are_those_of_the_prompt(stub: Any, model: Path, truncate: int) -> None:
    """Alone, and next to a longer prompt that does not ask for them."""
    fields: dict[str, Any] = {"prefill_logprobs": True, "truncate": truncate, "parameters": {"temperature": 0.1}}
    other = new_request(next(ids), LONG_PROMPT, new=2)
    alone = ask(stub, **fields)
    batched, plain = ask_together(stub, new_request(next(ids), PROMPT, new=2, **fields), other)
    prompt_ids = encode(PROMPT)
    prompt_ids = [prompt_ids[0], *prompt_ids[-truncate + 1 :]] if truncate else prompt_ids
    expected = logprobs_of(model, tuple(prompt_ids))
    for answer in (alone, batched):
        assert answer.prefill_tokens is not None
        assert list(answer.prefill_tokens.ids) == prompt_ids
        assert np.isnan(answer.prefill_tokens.logprobs[0])
        wanted = [expected[number, id] for number, id in enumerate(prompt_ids[1:])]
        assert list(answer.prefill_tokens.logprobs[1:]) == pytest.approx(wanted, abs=1e-4)
        assert answer.prefill_tokens.texts[0] == BOS
    assert plain.prefill_tokens is None


def test_truncate_is_the_requests_own(stub: Any, model: Path) -> None:
    """The rightmost tokens are kept, after the BOS that the tokenizer adds."""
    truncates = (3, 0, 64)
    together = ask_together(
        stub, *[new_request(next(ids), LONG_PROMPT, new=NEW, truncate=truncate) for truncate in truncates]
    )
    for truncate, answer in zip(truncates, together, strict=True):
        assert answer.ids == ask(stub, LONG_PROMPT, truncate=truncate).ids
    assert tuple(together[1].ids) == greedy_reference(model, LONG_PROMPT).ids[:NEW]
    assert tuple(together[0].ids) == greedy_reference(model, LONG_PROMPT[-2:]).ids[:NEW]


@pytest.mark.parametrize("neighbour_len", [5, 20, 45])
def test_answer_is_the_same_in_every_prefill_bucket(stub: Any, model: Path, neighbour_len: int) -> None:
    """A neighbour moves the prefill from the bucket of 16 tokens to those of 32 and 64."""
    prompt = prompt_of_len(11)
    neighbour = new_request(next(ids), prompt_of_len(neighbour_len), new=1)
    answer, _ = ask_together(stub, new_request(next(ids), prompt, new=NEW), neighbour)
    assert tuple(answer.ids) == greedy_reference(model, prompt).ids[:NEW]
    assert answer.logprobs == pytest.approx(greedy_reference(model, prompt).logprobs[:NEW], abs=1e-4)


def test_bos_is_added_once(stub: Any) -> None:
    assert ask(stub, BOS + PROMPT).ids == ask(stub, PROMPT).ids


def test_empty_prompt_is_answered_from_bos(stub: Any, model: Path) -> None:
    assert tuple(ask(stub, "").ids) == greedy_reference(model, "").ids[:NEW]


def test_stop_sequence_ends_the_request_and_stays_in_the_text(stub: Any) -> None:
    texts = ask(stub).texts
    stop = "".join(texts[3:5])
    first = next(n for n in range(1, NEW + 1) if stop in "".join(texts[:n]))
    stopped, going_on = ask_together(
        stub, new_request(next(ids), PROMPT, new=NEW, stop=["never", stop]), new_request(next(ids), PROMPT, new=NEW)
    )
    assert stopped.end is not None
    assert (len(stopped.ids), stopped.end.finish_reason) == (first, pb.FINISH_REASON_STOP_SEQUENCE)
    assert stop in stopped.end.text
    assert len(going_on.ids) == NEW


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("temperature", {"parameters": {"temperature": -1.0}}),
        ("temperature", {"parameters": {"temperature": float("nan")}}),
        ("top_p", {"parameters": {"top_p": 1.5}}),
        ("typical_p", {"parameters": {"typical_p": -0.1}}),
        ("repetition_penalty", {"parameters": {"repetition_penalty": float("inf")}}),
        ("frequency_penalty", {"parameters": {"frequency_penalty": float("nan")}}),
        ("top_n_tokens", {"top_n_tokens": 65}),
        ("grammar", {"parameters": {"grammar": "(", "grammar_type": pb.GRAMMAR_TYPE_REGEX}}),
        ("grammar", {"parameters": {"grammar": "{not json", "grammar_type": pb.GRAMMAR_TYPE_JSON}}),
    ],
)
def test_bad_value_is_refused_by_name_and_nothing_else_is_lost(stub: Any, field: str, fields: dict[str, Any]) -> None:
    driver = Driver(stub)
    running = driver.prefill(next(ids), request := new_request(next(ids), PROMPT, new=NEW))
    with pytest.raises(grpc.RpcError) as refusal:
        driver.prefill(next(ids), new_request(next(ids), PROMPT, **fields))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (refusal.value.details() or "")
    driver.drain(running)
    assert driver.answers[request.id].ids == ask(stub).ids


def test_grammar_restricts_its_own_request_only(stub: Any, model: Path) -> None:
    digits = {"grammar": "[0-9]{3}", "grammar_type": pb.GRAMMAR_TYPE_REGEX}
    for parameters in (digits, {**digits, **SAMPLED, "seed": 4}):
        restricted, plain = ask_together(
            stub,
            new_request(next(ids), PROMPT, new=NEW, ignore_eos=False, parameters=parameters),
            new_request(next(ids), PROMPT, new=NEW),
        )
        assert restricted.end is not None
        assert len(restricted.end.text) == 3
        assert restricted.end.text.isdigit()
        assert restricted.end.finish_reason == pb.FINISH_REASON_EOS_TOKEN
        assert tuple(plain.ids) == greedy_reference(model, PROMPT).ids[:NEW]


def test_grammar_that_is_not_finished_ends_with_length(stub: Any) -> None:
    answer = ask(stub, new=2, parameters={"grammar": "[0-9]{5}", "grammar_type": pb.GRAMMAR_TYPE_REGEX})
    assert answer.end is not None
    assert (len(answer.end.text), answer.end.finish_reason) == (2, pb.FINISH_REASON_LENGTH)


def test_watermark_changes_the_answer_and_only_its_own(stub: Any, model: Path) -> None:
    """What is favoured after each token is known, so the marked answer can be recomputed."""
    from tpu_tgi_server.model.watermark import Watermark

    marked, plain = ask_together(
        stub,
        new_request(next(ids), PROMPT, new=NEW, parameters={"watermark": True}),
        new_request(next(ids), PROMPT, new=NEW),
    )
    history = list(encode(PROMPT))
    green = Watermark(VOCAB_SIZE, 0.5)
    for token in marked.ids:
        words = green.green_bits(history[-1])
        is_green = np.array([(int(words[id // 32]) >> (id % 32)) & 1 for id in range(VOCAB_SIZE)])
        assert token == int((logprobs_of(model, tuple(history))[-1] + 2.0 * is_green).argmax())
        history.append(token)
    assert tuple(plain.ids) == greedy_reference(model, PROMPT).ids[:NEW]
