"""The slots as flat arrays: what a step needs to know of every slot, kept up to date as requests come, step and go."""

from bisect import insort
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from tpu_tgi_server.engine.randomness import uniform
from tpu_tgi_server.engine.sequence import Sequence
from tpu_tgi_server.engine.types import Limits, Sampling
from tpu_tgi_server.model.interface import SamplerInputs
from tpu_tgi_server.model.watermark import Watermark

UINT64 = 2**64
SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""An accelerator may read a float32 below this as 0."""


class SlotTable:
    """Owns the list of free slots, in order, and one row of numbers for each slot.

    Attributes:
        token_ids: int32 [B], the newest token of each slot.
        slot_lens: int32 [B], how many positions of each slot are written, or will be by steps that are started; 0 for
            free slots, and at most the slot's last position.
    """

    def __init__(self, limits: Limits, vocab_size: int, watermark_gamma: float) -> None:
        num_slots = limits.num_slots
        self._last_position = limits.max_total_tokens - 1
        self.token_ids = np.zeros(num_slots, np.int32)
        self.slot_lens = np.zeros(num_slots, np.int32)
        self._free = list(range(num_slots))
        self._num_mask_words = -(-vocab_size // 32)
        self._watermark = Watermark(vocab_size, watermark_gamma)
        self._seeds = np.zeros(num_slots, np.uint64)
        self._steps = np.zeros(num_slots, np.uint64)
        self._is_sampled = np.zeros(num_slots, np.int32)
        self._top_k = np.zeros(num_slots, np.int32)
        self._temperature = np.ones(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._typical_p = np.ones(num_slots, np.float32)
        self._repetition_penalty = np.ones(num_slots, np.float32)
        self._frequency_penalty = np.zeros(num_slots, np.float32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence) -> int:
        """Give the first free slot to a sequence; return it."""
        slot = sequence.slot = self._free.pop(0)
        self._write_sampling(slot, sequence.request.sampling)
        return slot

    @staticmethod
    def num_used(sequences: SequenceOf[Sequence]) -> int:
        """How many slots there are up to the last one of these sequences."""
        return 1 + max(sequence.slot for sequence in sequences if sequence.slot is not None)

    def begin_steps(self, sequences: SequenceOf[Sequence], num_steps: int) -> None:
        """Enter that steps are started: the cells that they write are no scratch any more."""
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        self.slot_lens[slots] = np.minimum(self.slot_lens[slots] + num_steps, self._last_position)

    def advance(self, sequence: Sequence) -> None:
        """Enter the newest token of a sequence, and how far it has come."""
        assert sequence.slot is not None
        self.token_ids[sequence.slot] = sequence.last_id
        self.slot_lens[sequence.slot] = sequence.slot_len
        self._steps[sequence.slot] = len(sequence.output_ids)

    def release(self, sequence: Sequence) -> None:
        """Take the slot back. Nothing on the device changes: the slot's cells become scratch."""
        assert sequence.slot is not None
        self.slot_lens[sequence.slot] = 0
        self._write_sampling(sequence.slot, Sampling())
        insort(self._free, sequence.slot)
        sequence.slot = None

    def sampler_inputs(self, sequences: SequenceOf[Sequence], step: int = 0) -> SamplerInputs | None:
        """What the sampler needs for a step of these sequences; None if all of them take the best token.

        `step` counts the steps that are started together, from 0; later ones can have no grammar and no watermark.
        """
        if not any(sequence.request.needs_sampler for sequence in sequences):
            return None
        is_stepped = np.zeros_like(self._top_k)
        is_stepped[[sequence.slot for sequence in sequences if sequence.slot is not None]] = 1
        return SamplerInputs(
            top_k=self._top_k,
            is_sampled=self._is_sampled,
            is_stepped=is_stepped,
            temperature=self._temperature,
            top_p=self._top_p,
            typical_p=self._typical_p,
            repetition_penalty=self._repetition_penalty,
            frequency_penalty=self._frequency_penalty,
            uniform=uniform(self._seeds, self._steps + np.uint64(step)),
            allowed=self._allowed(sequences),
            favoured=self._favoured(sequences),
            wants_top_tokens=any(sequence.request.top_n_tokens for sequence in sequences),
            wants_prompt_logprobs=any(sequence.request.prefill_logprobs for sequence in sequences),
        )

    def _write_sampling(self, slot: int, sampling: Sampling) -> None:
        """Enter what a request asks of the sampler. 0 means unset where the neutral value is 1."""
        self._seeds[slot] = sampling.seed % UINT64
        self._steps[slot] = 0
        self._is_sampled[slot] = sampling.is_sampled
        self._top_k[slot] = min(sampling.top_k, np.iinfo(np.int32).max)
        self._temperature[slot] = max(sampling.temperature or 1, SMALLEST_TEMPERATURE)
        self._top_p[slot] = sampling.top_p or 1
        self._typical_p[slot] = sampling.typical_p or 1
        self._repetition_penalty[slot] = sampling.repetition_penalty or 1
        self._frequency_penalty[slot] = sampling.frequency_penalty

    def _allowed(self, sequences: SequenceOf[Sequence]) -> NDArray[np.int32] | None:
        restricted = [sequence for sequence in sequences if sequence.grammar is not None]
        if not restricted:
            return None
        masks = np.full((len(self.token_ids), self._num_mask_words), -1, np.int32)
        for sequence in restricted:
            assert sequence.grammar is not None
            masks[sequence.slot] = sequence.grammar.mask()
        return masks

    def _favoured(self, sequences: SequenceOf[Sequence]) -> NDArray[np.int32] | None:
        marked = [sequence for sequence in sequences if sequence.request.sampling.watermark]
        if not marked:
            return None
        masks = np.zeros((len(self.token_ids), self._num_mask_words), np.int32)
        for sequence in marked:
            masks[sequence.slot] = self._watermark.green_bits(sequence.last_id)
        return masks
