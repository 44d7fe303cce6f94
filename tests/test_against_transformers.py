"""Greedy ids and log-probabilities equal those of `model.generate`, however requests are batched.

Each test runs on plain torch and on XLA, through the real server.
"""

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Answer, Driver, new_request
from tests.reference import NUM_REFERENCE_TOKENS, Reference, greedy_reference, prompt_of_len
from tests.servers import ready_server, start_model_server
from tests.tiny_model import EOS
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

PROMPT_LENS = (1, 2, 7, 16, 33, 60, 128, 200)
PROMPTS = tuple(map(prompt_of_len, PROMPT_LENS))


SMALL_PACE = ["--prefill-chunk-tokens", "32", "--decode-steps", "3"]
PACES: dict[str, list[str]] = {"default": [], "plain": ["--no-step-ahead"], "small": SMALL_PACE}
"""Long prompts in one piece or in chunks, one token a call or several, in step with the router or ahead of it."""


LLAMA = ["cpu default llama", "cpu plain llama", "cpu small llama", "xla-cpu default llama", "xla-cpu small llama"]
WINDOWED = ["cpu small windowed", "xla-cpu small windowed"]
"""One layer of that model keeps 48 cells of 256 positions: the window of 8 and a chunk of 32, in units of 16."""


@pytest.fixture(scope="module", params=[*LLAMA, *WINDOWED])
def setup(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """Device, pace and model of a server."""
    device, pace, model = request.param.split()
    return device, pace, model


@pytest.fixture(scope="module")
def stub(setup: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Any]:
    device, pace, _ = setup
    folder = tmp_path_factory.mktemp(device)
    options = ["--device", device, "--max-total-tokens", "256", "--max-batch-size", "8", *PACES[pace]]
    with ready_server(start_model_server(folder, model, *options)) as server, server.connect() as stub:
        yield stub


@pytest.fixture(scope="module")
def model(setup: tuple[str, str, str], tiny_model_folder: Path, windowed_model_folder: Path) -> Path:
    return windowed_model_folder if setup[2] == "windowed" else tiny_model_folder


@pytest.fixture
def references(model: Path) -> list[Reference]:
    return [greedy_reference(model, prompt) for prompt in PROMPTS]


def assert_equal(answer: Answer, reference: Reference, num_tokens: int = NUM_REFERENCE_TOKENS) -> None:
    assert tuple(answer.ids) == reference.ids[:num_tokens]
    assert answer.logprobs == pytest.approx(reference.logprobs[:num_tokens], abs=1e-4)


def test_references_are_as_long_as_they_claim_and_differ(references: list[Reference]) -> None:
    assert tuple(len(reference.prompt_ids) for reference in references) == PROMPT_LENS
    assert len({reference.ids for reference in references}) == len(PROMPTS)


def test_prompts_sent_alone(stub: Any, references: list[Reference]) -> None:
    driver = Driver(stub)
    for number, (prompt, reference) in enumerate(zip(PROMPTS, references, strict=True)):
        (answer,) = driver.run(number, new_request(number, prompt, new=NUM_REFERENCE_TOKENS))
        assert_equal(answer, reference)


def test_prompts_in_one_prefill(stub: Any, references: list[Reference]) -> None:
    requests = [new_request(number, prompt, new=NUM_REFERENCE_TOKENS) for number, prompt in enumerate(PROMPTS)]
    for answer, reference in zip(Driver(stub).run(0, *requests), references, strict=True):
        assert_equal(answer, reference)


@pytest.mark.parametrize("order", [range(8), range(7, -1, -1)], ids=["short first", "long first"])
def test_join_does_not_change_running_requests(stub: Any, references: list[Reference], order: range) -> None:
    """At every decode step one more prompt joins."""
    driver = Driver(stub)
    running: pb.CachedBatch | None = None
    for number in order:
        joining = driver.prefill(number, new_request(number, PROMPTS[number], new=NUM_REFERENCE_TOKENS))
        running = driver.decode(*[batch for batch in (running, joining) if batch])
    driver.drain(running)
    for number, reference in enumerate(references):
        assert_equal(driver.answers[number], reference)


@pytest.mark.parametrize("order", list(permutations((2, 3, 5, 8))))
def test_slots_may_finish_in_any_order(stub: Any, references: list[Reference], order: tuple[int, ...]) -> None:
    numbers = (0, 2, 5, 7)
    requests = [new_request(number, PROMPTS[number], new=new) for number, new in zip(numbers, order, strict=True)]
    for number, new, answer in zip(numbers, order, Driver(stub).run(0, *requests), strict=True):
        assert_equal(answer, references[number], new)
        assert answer.end is not None
        assert answer.end.finish_reason == pb.FINISH_REASON_LENGTH


def test_slots_are_reused_without_a_trace(stub: Any, references: list[Reference]) -> None:
    """A long prompt, then a short one in the same slot, while a neighbour runs through."""
    driver = Driver(stub)
    neighbour = driver.prefill(100, new_request(100, PROMPTS[4], new=200))
    for number in (7, 0, 6, 1):
        joining = driver.prefill(number, new_request(number, PROMPTS[number], new=3))
        while driver.answers[number].end is None:
            neighbour = driver.decode(*[batch for batch in (neighbour, joining) if batch])
            joining = None
        assert_equal(driver.answers[number], references[number], 3)
    driver.drain(neighbour)
    answer = driver.answers[100]
    assert tuple(answer.ids[:NUM_REFERENCE_TOKENS]) == references[4].ids
    assert len(answer.ids) == 200


def test_liveness_probe_does_not_change_running_requests(stub: Any, references: list[Reference]) -> None:
    driver = Driver(stub)
    running: pb.CachedBatch | None = driver.prefill(
        0, *[new_request(number, prompt, new=NUM_REFERENCE_TOKENS) for number, prompt in enumerate(PROMPTS)]
    )
    probes = 0
    while running is not None:
        probe = Driver(stub)
        probe.run(2**64 - 1, new_request(2**64 - 1, "liveness", new=1))
        probes += 1
        running = driver.decode(running)
    assert probes >= NUM_REFERENCE_TOKENS // 3
    for number, reference in enumerate(references):
        assert_equal(driver.answers[number], reference)


def test_end_token_ends_the_answer_unless_it_is_ignored(stub: Any, model: Path) -> None:
    """The first prompt is one whose answer runs into EOS."""
    eos_id = 1
    prompt = next(text for text in map(prompt_of_len, range(2, 120)) if eos_id in greedy_reference(model, text).ids)
    reference = greedy_reference(model, prompt)
    num_tokens = reference.ids.index(eos_id) + 1
    stopped, ignoring = Driver(stub).run(
        1,
        new_request(1, prompt, new=NUM_REFERENCE_TOKENS, ignore_eos=False),
        new_request(2, prompt, new=NUM_REFERENCE_TOKENS),
    )
    assert_equal(stopped, reference, num_tokens)
    assert stopped.end is not None
    assert stopped.end.finish_reason == pb.FINISH_REASON_EOS_TOKEN
    assert (stopped.texts[-1], stopped.is_special[-1]) == (EOS, True)
    assert EOS not in stopped.end.text
    assert_equal(ignoring, reference)
