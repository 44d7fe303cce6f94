"""Host arrays to the few tensors that travel to the device in a step, and back.

Everything that varies is data, never a Python number, so a graph depends on its bucket alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tpu_tgi_server.model.interface import NextTokens, Prompt, SamplerInputs

SAMPLER_FIELDS = (
    "is_stepped",
    "is_sampled",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "uniform",
)
NUM_PROMPT_FIELDS = 5


def pack_prompts(prompts: Sequence[Prompt], num_tokens: int, num_slots: int) -> NDArray[np.int32]:
    """Lay prompts one after the other in one row of `num_tokens` tokens.

    Returns:
        int32 [5 * num_tokens + num_slots]: token ids, segments, positions, slots and cells of every token, then for
        each slot the index of its prompt's last token (0 for slots without a prompt). Padding is a segment of its own
        and goes to the scratch cell of the last prompt's slot.
    """
    rows = np.zeros((NUM_PROMPT_FIELDS, num_tokens), np.int32)
    token_ids, segments, positions, slots, cells = rows
    last_indexes = np.zeros(num_slots, np.int32)
    end = 0
    for segment, prompt in enumerate(prompts):
        start, end = end, end + len(prompt.token_ids)
        token_ids[start:end] = prompt.token_ids
        segments[start:end] = segment
        positions[start:end] = np.arange(end - start)
        slots[start:end] = prompt.slot
        cells[start:end] = positions[start:end] if prompt.is_kept else prompt.slot_len
        last_indexes[prompt.slot] = end - 1
    last = prompts[-1]
    segments[end:] = len(prompts)
    slots[end:] = last.slot
    cells[end:] = len(last.token_ids) if last.is_kept else last.slot_len
    return np.concatenate([rows.reshape(-1), last_indexes])


def pack_sampler(inputs: SamplerInputs) -> NDArray[np.float32]:
    """float32 [9, B], the rows in the order of SAMPLER_FIELDS; integers below 2**24 are exact."""
    return np.stack([getattr(inputs, name).astype(np.float32) for name in SAMPLER_FIELDS])


def unpack_sampler(packed: Tensor) -> dict[str, Tensor]:
    """The rows of `pack_sampler` by name, each float32 [B, 1]."""
    return dict(zip(SAMPLER_FIELDS, packed[:, :, None], strict=True))


def pack_masks(inputs: SamplerInputs, num_slots: int, vocab_size: int) -> NDArray[np.int32] | None:
    """int32 [2, B, ceil(V / 32)], allowed and favoured tokens; None if no slot has a grammar or a watermark."""
    if inputs.allowed is None and inputs.favoured is None:
        return None
    masks = neutral_masks(num_slots, vocab_size)
    if inputs.allowed is not None:
        masks[0] = inputs.allowed
    if inputs.favoured is not None:
        masks[1] = inputs.favoured
    return masks


def neutral_masks(num_slots: int, vocab_size: int) -> NDArray[np.int32]:
    """Every token is allowed, none is favoured."""
    masks = np.zeros((2, num_slots, num_mask_words(vocab_size)), np.int32)
    masks[0] = -1
    return masks


def num_mask_words(vocab_size: int) -> int:
    """How many int32 hold one bit for each token."""
    return -(-vocab_size // 32)


def unpack_result(
    result: NDArray[np.float32], num_slots: int, num_top: int, prompt_lens: Mapping[int, int]
) -> NextTokens:
    """The flat result of a step as arrays.

    Args:
        result: float32, ids and log-probabilities of B slots, their N top ids and log-probabilities, and for a prefill
            with prompt log-probabilities one number for each of its tokens.
        num_slots: B.
        num_top: N, 0 where they were not computed.
        prompt_lens: how many tokens the prompt of each slot has, in their order; empty where prompt log-probabilities
            were not computed.
    """
    table = result[: 2 * num_slots * (1 + num_top)]
    top_ids, top_logprobs = table[2 * num_slots :].reshape(2, num_slots, num_top)
    of_tokens = result[len(table) :]
    of_slots = {}
    end = 0
    for slot, length in prompt_lens.items():
        start, end = end, end + length
        of_slots[slot] = of_tokens[start : end - 1]  # entry i is about token i + 1, so a prompt's last is about nothing
    return NextTokens(
        ids=table[:num_slots].astype(np.int32),
        logprobs=table[num_slots : 2 * num_slots],
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_logprobs,
        prompt_logprobs=of_slots,
    )
