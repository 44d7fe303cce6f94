"""The sampler against transformers' logits processors, and against NumPy where transformers has none."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.model import reference_sampler as reference
from tpu_tgi_server.engine.randomness import uniform
from tpu_tgi_server.model.sampling import (
    ALL_STAGES,
    SamplerTensors,
    Stages,
    choose,
    choose_greedily,
    draw,
    filtered_probabilities,
    least_by_rank,
    least_by_search,
    process_scores,
    prompt_logprobs,
    unpack_bits,
)

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Asked:
    """What one slot asks for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    history: tuple[int, ...] = (0,)
    is_sampled: bool = True
    uniform: float = 0.5


def pack_bits(bits: np.ndarray[Any, np.dtype[np.bool_]]) -> Tensor:
    """int32 [B, words] from bool [B, V], lowest bit first."""
    padded = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), np.bool_)
    padded[:, : bits.shape[1]] = bits
    return torch.from_numpy(np.packbits(padded, axis=-1, bitorder="little").view(np.int32))


def tensors(
    asked: list[Asked], vocab_size: int, allowed: Tensor | None = None, favoured: Tensor | None = None
) -> SamplerTensors:
    """The device tensors for a batch of slots."""

    def column(name: str) -> Tensor:
        return torch.tensor([[float(getattr(slot, name))] for slot in asked])

    counts = torch.tensor([[slot.history.count(token) for token in range(vocab_size)] for slot in asked])
    everything = np.ones((len(asked), vocab_size), np.bool_)
    return SamplerTensors(
        counts=counts.int(),
        lengths=torch.tensor([[len(slot.history)] for slot in asked], dtype=torch.int32),
        allowed=pack_bits(everything) if allowed is None else allowed,
        favoured=pack_bits(~everything) if favoured is None else favoured,
        watermark_delta=2.0,
        repetition_penalty=column("repetition_penalty"),
        frequency_penalty=column("frequency_penalty"),
        temperature=column("temperature"),
        top_k=column("top_k"),
        top_p=column("top_p"),
        typical_p=column("typical_p"),
        is_sampled=column("is_sampled"),
        uniform=column("uniform"),
    )


def probabilities(logits: Tensor, asked: list[Asked], stages: Stages = ALL_STAGES) -> Tensor:
    """The distribution that each slot draws from."""
    inputs = tensors(asked, logits.shape[-1])
    kept = filtered_probabilities(process_scores(logits, inputs, stages), inputs, stages)
    return kept / kept.sum(-1, keepdim=True)


def random_logits(seed: int, num_slots: int, vocab_size: int, spread: float) -> Tensor:
    return torch.randn(num_slots, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


fractions = st.floats(0.01, 0.99)
slots = st.lists(
    st.builds(
        Asked,
        temperature=st.floats(0.1, 3),
        top_k=st.integers(0, 60),
        top_p=st.just(1.0) | fractions,
        typical_p=st.just(1.0) | fractions,
        repetition_penalty=st.just(1.0) | st.floats(0.5, 2),
        frequency_penalty=st.just(0.0) | st.floats(-2, 2),
        history=st.lists(st.integers(0, 19), min_size=1, max_size=30).map(tuple),
    ),
    min_size=1,
    max_size=6,
)


@given(slots, st.integers(0, 2**31), st.integers(20, 50), st.floats(0.1, 5))
@settings(max_examples=150, deadline=None)
def test_any_mix_equals_transformers_processors_slot_by_slot(
    asked: list[Asked], seed: int, vocab_size: int, spread: float
) -> None:
    asked = [Asked(**{**vars(slot), "frequency_penalty": 0.0}) for slot in asked]
    logits = random_logits(seed, len(asked), vocab_size, spread)
    mixed = probabilities(logits, asked)
    for row, slot in enumerate(asked):
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(slot.repetition_penalty),
                TemperatureLogitsWarper(slot.temperature),
                TopKLogitsWarper(min(slot.top_k or vocab_size, vocab_size)),
                TopPLogitsWarper(slot.top_p),
                *([TypicalLogitsWarper(slot.typical_p)] if slot.typical_p < 1 else []),
            ]
        )
        scores = processors(torch.tensor([slot.history]), logits[row : row + 1])
        torch.testing.assert_close(mixed[row : row + 1], torch.softmax(scores, -1), atol=TOLERANCE, rtol=0)


@given(slots, st.integers(0, 2**31), st.integers(20, 50), st.floats(0.1, 5))
@settings(max_examples=100, deadline=None)
def test_any_mix_equals_numpy_slot_by_slot(asked: list[Asked], seed: int, vocab_size: int, spread: float) -> None:
    logits = random_logits(seed, len(asked), vocab_size, spread)
    mixed = probabilities(logits, asked)
    for row, slot in enumerate(asked):
        expected = torch.from_numpy(expected_probabilities(logits[row], slot)).float()
        torch.testing.assert_close(mixed[row], expected, atol=TOLERANCE, rtol=0)


def expected_probabilities(logits: Tensor, slot: Asked) -> reference.Row:
    scores = logits.double().numpy()
    scores = reference.with_repetition_penalty(scores, list(slot.history), slot.repetition_penalty)
    scores = reference.with_frequency_penalty(scores, list(slot.history), slot.frequency_penalty)
    scores = reference.with_top_k(scores / slot.temperature, slot.top_k)
    scores = reference.with_typical_p(reference.with_top_p(scores, slot.top_p), slot.typical_p)
    return reference.softmax(scores)


@given(slots, st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_stages_that_no_slot_needs_change_nothing(asked: list[Asked], seed: int) -> None:
    logits = random_logits(seed, len(asked), 40, 2.0)
    needed = Stages(
        watermark=False,
        grammar=False,
        penalties=any(slot.repetition_penalty != 1 or slot.frequency_penalty for slot in asked),
        top_k=any(slot.top_k for slot in asked),
        top_p=any(slot.top_p < 1 for slot in asked),
        typical_p=any(slot.typical_p < 1 for slot in asked),
    )
    torch.testing.assert_close(probabilities(logits, asked, needed), probabilities(logits, asked), atol=1e-7, rtol=0)


distances = st.floats(0, allow_infinity=True, width=32, allow_subnormal=False)


@given(st.lists(st.tuples(distances, st.integers(0, 8)), min_size=1, max_size=40), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_search_and_sort_find_the_same_value(pairs: list[tuple[float, int]], mass: int) -> None:
    """Weights are whole numbers of eighths, so that no sum is rounded."""
    values, eighths = zip(*pairs, strict=True)
    arguments = (torch.tensor([values]), torch.tensor([eighths]) / 8, torch.tensor([[mass / 8]]))
    (found,) = least_by_search(*arguments)[0].tolist()
    assert found == least_by_rank(*arguments)[0, 0]
    reaching = [bound for bound in values if sum(weight for value, weight in pairs if value <= bound) >= mass]
    assert found == min(reaching, default=float("inf"))


def chi_squared_limit(degrees: int) -> float:
    """A value that chi-squared exceeds once in about 30,000 times (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 4 * spread**0.5) ** 3)


MIXES = [
    Asked(),
    *(Asked(temperature=temperature) for temperature in (0.3, 0.7, 1.5, 3.0)),
    *(Asked(top_k=top_k) for top_k in (2, 5, 10, 10**6)),
    *(Asked(top_p=top_p) for top_p in (0.1, 0.5, 0.9, 0.99)),
    *(Asked(typical_p=typical_p) for typical_p in (0.2, 0.6, 0.95)),
    Asked(repetition_penalty=1.8, history=(1, 1, 2, 3)),
    Asked(frequency_penalty=1.5, history=(1, 1, 2, 3)),
    Asked(temperature=0.8, top_k=20, top_p=0.9),
    Asked(temperature=1.3, top_k=15, top_p=0.95, typical_p=0.8, repetition_penalty=1.2, history=(5, 6)),
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_draws_follow_the_exact_distribution(mix: Asked) -> None:
    assert len(MIXES) == 20
    num_draws = 20_000
    logits = random_logits(7, 1, 40, 1.5)
    draws = uniform(np.arange(num_draws, dtype=np.uint64), np.full(num_draws, 3, np.uint64))
    kept = probabilities(logits, [mix]).expand(num_draws, -1)
    observed = torch.bincount(draw(kept, torch.from_numpy(draws)[:, None])[:, 0], minlength=40).numpy()
    expected = expected_probabilities(logits[0], mix) * num_draws
    assert observed[expected == 0].sum() == 0
    is_common = expected >= 5
    rare = (expected[~is_common].sum(), observed[~is_common].sum())
    pairs = [*zip(expected[is_common], observed[is_common], strict=True), *([rare] if rare[0] > 0 else [])]
    if len(pairs) > 1:
        chi_squared = sum((seen - wanted) ** 2 / wanted for wanted, seen in pairs)
        assert chi_squared < chi_squared_limit(len(pairs) - 1)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-24])
def test_extreme_random_numbers_never_draw_an_impossible_token(number: float) -> None:
    kept = probabilities(random_logits(1, 64, 3000, 3.0), [Asked(top_k=7)] * 64)
    chosen = draw(kept, torch.full((64, 1), number))
    assert (kept.gather(-1, chosen) > 0).all()


def test_filters_never_leave_nothing() -> None:
    asked = [Asked(top_k=1), Asked(top_p=1e-6), Asked(typical_p=1e-6), Asked(temperature=1e-30)]
    kept = probabilities(random_logits(2, 4, 100, 2.0), asked)
    assert (kept.count_nonzero(-1) == 1).all()
    assert not kept.isnan().any()


def test_flat_logits_keep_every_token_that_ties() -> None:
    kept = probabilities(torch.zeros(3, 10), [Asked(top_k=0), Asked(top_k=3), Asked(top_p=0.3)])
    torch.testing.assert_close(kept, torch.full((3, 10), 0.1))


def test_greedy_and_sampled_slots_share_a_step() -> None:
    logits = random_logits(3, 4, 50, 1.0)
    asked = [Asked(is_sampled=sampled, temperature=5.0, uniform=0.999) for sampled in (False, True, False, True)]
    ids = choose(logits, tensors(asked, 50), ALL_STAGES)[:4].int()
    assert ids[0] == logits[0].argmax()
    assert ids[2] == logits[2].argmax()
    expected = draw(probabilities(logits, asked), torch.full((4, 1), 0.999))
    assert ids[[1, 3]].tolist() == expected[[1, 3], 0].tolist()


def test_logprobs_are_of_the_raw_logits_whatever_the_choice_is_made_from() -> None:
    logits = random_logits(4, 2, 50, 1.0)
    asked = [Asked(temperature=0.2, top_k=2, repetition_penalty=1.9, history=(1, 2, 3)), Asked(top_p=0.2)]
    result = choose(logits, tensors(asked, 50), ALL_STAGES)
    ids, logprobs = result[:2].long(), result[2:4]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0])


def test_top_tokens_are_the_best_of_the_raw_logits() -> None:
    logits = random_logits(5, 2, 200, 1.0)
    result = choose(logits, tensors([Asked(top_p=0.1), Asked()], 200), ALL_STAGES)
    top_ids, top_logprobs = result[4:].reshape(2, 2, 64)
    best = torch.log_softmax(logits, -1).topk(64)
    assert torch.equal(top_ids.long(), best.indices)
    torch.testing.assert_close(top_logprobs, best.values)


def test_grammar_restricts_greedy_and_sampled_choices() -> None:
    logits = random_logits(6, 3, 70, 1.0)
    only = torch.zeros(3, 70, dtype=torch.bool)
    only[0, 69] = only[1, 32] = True
    only[2] = True
    asked = [Asked(is_sampled=False), Asked(), Asked(is_sampled=False)]
    result = choose(logits, tensors(asked, 70, allowed=pack_bits(only.numpy())), ALL_STAGES)
    assert result[:3].int().tolist() == [69, 32, int(logits[2].argmax())]


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-45},
        {"repetition_penalty": 3e38},
        {"repetition_penalty": 3e38, "frequency_penalty": 3e38},
        {"repetition_penalty": 1e-45, "frequency_penalty": -3e38},
        {"temperature": 1e-38, "top_p": 1e-45, "typical_p": 1e-45},
        {"temperature": 3e38, "top_p": 0.5},
    ],
    ids=str,
)
def test_extreme_parameters_choose_a_token_that_the_grammar_allows(extreme: dict[str, float], is_sampled: bool) -> None:
    logits = random_logits(7, 2, 70, 5.0)
    logits[1] = torch.nan  # what a model may make in half precision
    allowed = torch.zeros(2, 70, dtype=torch.bool)
    allowed[:, 30:40] = True
    asked = [Asked(**extreme, history=tuple(range(70)), is_sampled=is_sampled, top_k=50)] * 2
    chosen = choose(logits, tensors(asked, 70, allowed=pack_bits(allowed.numpy())), ALL_STAGES)[:2]
    assert all(30 <= token < 40 for token in chosen.int().tolist())


def test_watermark_adds_its_delta_to_favoured_tokens_only() -> None:
    logits = random_logits(7, 2, 40, 1.0)
    favoured = np.zeros((2, 40), np.bool_)
    favoured[1, [3, 39]] = True
    scores = process_scores(logits, tensors([Asked(), Asked()], 40, favoured=pack_bits(favoured)), ALL_STAGES)
    torch.testing.assert_close(scores - logits, torch.from_numpy(favoured).float() * 2.0)


@given(st.lists(st.lists(st.booleans(), min_size=45, max_size=45), min_size=1, max_size=4))
def test_unpacked_bits_are_the_packed_ones(rows: list[list[bool]]) -> None:
    bits = np.array(rows)
    assert torch.equal(unpack_bits(pack_bits(bits), 45), torch.from_numpy(bits))


def test_prompt_logprobs_are_log_softmax_of_the_next_tokens() -> None:
    logits = random_logits(8, 12, 60, 2.0)
    next_ids = torch.arange(12, dtype=torch.int32) * 3
    expected = torch.log_softmax(logits, -1)[torch.arange(12), next_ids.long()]
    torch.testing.assert_close(prompt_logprobs(logits, next_ids), expected)


def test_greedy_choice_is_the_best_token_with_its_log_softmax_in_float32() -> None:
    logits = random_logits(9, 4, 1000, 1.0).bfloat16()
    ids, logprobs = choose_greedily(logits).reshape(2, 4)
    assert ids.tolist() == logits.float().argmax(-1).tolist()
    expected = torch.log_softmax(logits.float(), -1).gather(1, ids.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0)


def test_large_ids_are_exact() -> None:
    logits = torch.zeros(1, 262_145)
    logits[0, 262_143] = 1.0
    assert int(choose_greedily(logits)[0]) == 262_143
