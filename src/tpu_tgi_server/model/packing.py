"""Host arrays to the few tensors that travel to the device in a step, and back.

Everything that varies is data, never a Python number, so a graph depends on its bucket alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tpu_tgi_server.model.interface import NextTokens, PromptChunk, SamplerInputs

CHOICE_FIELDS = (
    "is_sampled",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "uniform",
)
STATE_FIELDS = ("token_id", "slot_len", "is_from_host")
SAMPLER_FIELDS = ("is_stepped", *CHOICE_FIELDS, *STATE_FIELDS)
NUM_TOKEN_FIELDS = 6
NUM_SLOT_FIELDS = 2


def pack_chunks(chunks: Sequence[PromptChunk], num_tokens: int, num_slots: int) -> NDArray[np.int32]:
    """Lay chunks of prompts one after the other in one row of `num_tokens` tokens.

    Returns:
        int32 [6 * num_tokens + 2 * num_slots], see `unpack_chunks`. Padding is a segment of its own and goes to the
        scratch position of the last chunk's slot.
    """
    of_tokens = np.zeros((NUM_TOKEN_FIELDS, num_tokens), np.int32)
    of_slots = np.zeros((NUM_SLOT_FIELDS, num_slots), np.int32)
    token_ids, next_ids, segments, positions, slots, write_positions = of_tokens
    last_indexes, is_begun = of_slots
    end = 0
    for segment, chunk in enumerate(chunks):
        begin, end = end, end + len(chunk.token_ids)
        token_ids[begin:end] = chunk.token_ids
        next_ids[begin:end] = [*chunk.token_ids[1:], chunk.next_id]
        segments[begin:end] = segment
        positions[begin:end] = np.arange(chunk.start, chunk.end)
        slots[begin:end] = chunk.slot
        write_positions[begin:end] = positions[begin:end] if chunk.is_kept else chunk.scratch_position
        last_indexes[chunk.slot] = end - 1
        is_begun[chunk.slot] = chunk.is_kept and chunk.start == 0
    last = chunks[-1]
    segments[end:] = len(chunks)
    slots[end:] = last.slot
    write_positions[end:] = last.end if last.is_kept else last.scratch_position
    return np.concatenate([of_tokens.reshape(-1), of_slots.reshape(-1)])


@dataclass(frozen=True)
class ChunkTensors:
    """A packed row of T prompt tokens on the device, all int32.

    Attributes:
        token_ids, next_ids: [T], the prompt's tokens, and the token that comes after each.
        segments: [T], which chunk a token belongs to.
        positions: [T], the token's position in its prompt.
        slots, write_positions: [T], where its keys and values go: a slot, and a position there.
        last_indexes: [B], for each slot the index of its chunk's last token; 0 for slots without a chunk.
        is_begun: [B], 1 for slots whose prompt begins in this row.
    """

    token_ids: Tensor
    next_ids: Tensor
    segments: Tensor
    positions: Tensor
    slots: Tensor
    write_positions: Tensor
    last_indexes: Tensor
    is_begun: Tensor


def unpack_chunks(packed: Tensor, num_slots: int) -> ChunkTensors:
    """The fields of `pack_chunks`."""
    of_slots = packed[-NUM_SLOT_FIELDS * num_slots :].reshape(NUM_SLOT_FIELDS, num_slots)
    of_tokens = packed[: -NUM_SLOT_FIELDS * num_slots].reshape(NUM_TOKEN_FIELDS, -1)
    return ChunkTensors(*of_tokens, *of_slots)


def pack_sampler(inputs: SamplerInputs, num_slots: int, state: NDArray[np.int32] | None = None) -> NDArray[np.float32]:
    """The sampler's inputs, and in the same transfer the state of a decode step that the host knows.

    Args:
        inputs: of all slots.
        num_slots: B, how many of them are wanted.
        state: int32 [2, B], last token and length of each slot; None where the device has them, or nothing needs them.

    Returns:
        float32 [12, B], the rows in the order of SAMPLER_FIELDS; integers below 2**24 are exact.
    """
    rows = [inputs.is_stepped[:num_slots], *(getattr(inputs, name)[:num_slots] for name in CHOICE_FIELDS)]
    of_state = np.zeros((len(STATE_FIELDS), num_slots), np.float32)
    if state is not None:
        of_state[:2] = state
        of_state[2] = 1
    return np.concatenate([np.stack(rows).astype(np.float32), of_state])


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
    result: NDArray[np.float32], num_slots: int, num_top: int, chunk_lens: Mapping[int, int]
) -> NextTokens:
    """The flat result of a step as arrays.

    Args:
        result: float32, ids and log-probabilities of B slots, their N top ids and log-probabilities, and for a prefill
            with prompt log-probabilities one number for each of its tokens.
        num_slots: B.
        num_top: N, 0 where they were not computed.
        chunk_lens: how many tokens the chunk of each slot has, in their order; empty where prompt log-probabilities
            were not computed.
    """
    table = result[: 2 * num_slots * (1 + num_top)]
    top_ids, top_logprobs = table[2 * num_slots :].reshape(2, num_slots, num_top)
    of_tokens = result[len(table) :]
    of_slots = {}
    end = 0
    for slot, length in chunk_lens.items():
        begin, end = end, end + length
        of_slots[slot] = of_tokens[begin:end]
    return NextTokens(
        ids=table[:num_slots].astype(np.int32),
        logprobs=table[num_slots : 2 * num_slots],
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_logprobs,
        prompt_logprobs=of_slots,
    )
