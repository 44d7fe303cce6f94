"""What runs of the model for a step, on plain torch."""

from pathlib import Path

import numpy as np
import pytest

from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.model.interface import PromptChunk, SamplerInputs
from tpu_tgi_server.model.runner import ModelRunner
from tpu_tgi_server.runtime.cpu import CpuRuntime

NUM_SLOTS, PROMPT_LENS = 4, (3, 7)


@pytest.fixture(scope="module")
def runner(tiny_model_folder: Path) -> ModelRunner:
    """With prompts in the first two slots."""
    settings = Settings(str(tiny_model_folder), device=Device.CPU, max_batch_size=NUM_SLOTS, max_total_tokens=64)
    generator, _ = load_generator(settings, CpuRuntime(), lambda *_: None)
    runner = generator._model
    assert isinstance(runner, ModelRunner)
    runner.prefill([PromptChunk(slot, [*range(5, 5 + length)]) for slot, length in enumerate(PROMPT_LENS)], None)
    return runner


def sampler() -> SamplerInputs:
    """Everything that a stage can be asked for, a little different in each slot."""
    some, ones = np.linspace(0.5, 0.9, NUM_SLOTS, dtype=np.float32), np.ones(NUM_SLOTS, np.int32)
    masks = np.arange(NUM_SLOTS * 10, dtype=np.int32).reshape(NUM_SLOTS, 10) * 7919
    return SamplerInputs(
        top_k=ones * 40,
        is_sampled=ones,
        is_stepped=ones * 0,
        temperature=some,
        top_p=some,
        typical_p=some,
        repetition_penalty=some,
        frequency_penalty=some,
        uniform=some,
        allowed=~masks,
        favoured=masks,
        wants_top_tokens=True,
    )


@pytest.mark.parametrize("samplers", [[None, None], [sampler(), sampler()]], ids=["greedy", "sampled"])
def test_slots_behind_the_last_used_one_are_left_out_and_the_others_choose_the_same(
    runner: ModelRunner, samplers: list[SamplerInputs | None]
) -> None:
    token_ids, slot_lens = np.array([9, 8, 0, 0], np.int32), np.array([*PROMPT_LENS, 0, 0], np.int32)
    for whole, part in zip(
        *(runner.decode(token_ids, slot_lens, num_used, max(PROMPT_LENS), samplers)() for num_used in (NUM_SLOTS, 2)),
        strict=True,
    ):
        assert len(whole.ids) == NUM_SLOTS
        np.testing.assert_array_equal(part.ids, whole.ids[:2])
        np.testing.assert_allclose(part.logprobs, whole.logprobs[:2], atol=1e-5)
        np.testing.assert_array_equal(part.top_ids, whole.top_ids[:2])
