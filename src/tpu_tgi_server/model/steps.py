"""What runs on the device in one step, written as plain torch: the model, then the choice of tokens.

Inputs are the packed vectors of `model.packing`; results are one float32 vector each. Nothing here reads a value back.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tpu_tgi_server.model.attention import DecodeStep, PrefillStep, Step, prompts_of_row, running
from tpu_tgi_server.model.cache import Places, StaticCacheXla
from tpu_tgi_server.model.chunk_attention import ChunkStep
from tpu_tgi_server.model.packing import CHOICE_FIELDS, ChunkTensors, unpack_chunks, unpack_sampler
from tpu_tgi_server.model.sampling import SamplerTensors, Stages, choose, choose_greedily, prompt_logprobs


class DeviceSteps:
    """Owns what stays on the device: weights, cache, and how often each slot has seen each token.

    Attributes:
        counts: int32 [B, V]. A row is right for slots whose every step had a sampler, and unused for others.
    """

    def __init__(
        self, model: PreTrainedModel, cache: StaticCacheXla, counts: Tensor, slots: Tensor, watermark_delta: float
    ) -> None:
        self._model = model
        self._cache = cache
        self._counts = counts
        self._slots = slots
        self._watermark_delta = watermark_delta
        self.num_slots, self.vocab_size = counts.shape

    @property
    def cache_tensors(self) -> list[Tensor]:
        """What every step writes in place."""
        return [*self._cache.keys, *self._cache.values]

    @property
    def history_tensors(self) -> list[Tensor]:
        """What steps with a sampler write in place besides."""
        return [self._counts]

    def prefill(self, packed: Tensor, context_len: int | None) -> Tensor:
        """Best tokens after a row of prompt chunks: see `choose_greedily`.

        Args:
            packed: int32 [6 T + 2 B], see `pack_chunks`.
            context_len: None for chunks that begin their prompt; for the continuation of one, how many positions of
                its slot are read.
        """
        chunks = unpack_chunks(packed, self.num_slots)
        return choose_greedily(self._prompt_logits(chunks, context_len, chunks.last_indexes)[0])

    def prefill_sampled(
        self, packed: Tensor, context_len: int | None, sampler: Tensor, masks: Tensor, stages: Stages
    ) -> Tensor:
        """The sampler's choice after a prefill: see `choose`, then [T] of `prompt_logprobs`.

        Args:
            packed, context_len: as for `prefill`.
            sampler: float32 [12, B], see `pack_sampler`.
            masks: int32 [2, B, ceil(V / 32)], allowed and favoured tokens.
            stages: what may be left out.
        """
        chunks = unpack_chunks(packed, self.num_slots)
        fields = unpack_sampler(sampler)
        is_stepped = fields["is_stepped"][:, 0] > 0
        if stages.penalties:
            self._count_prompts(chunks, is_stepped)
        logits = self._prompt_logits(chunks, context_len, 0 if stages.prompt_logprobs else chunks.last_indexes)[0]
        last_logits = logits[chunks.last_indexes] if stages.prompt_logprobs else logits
        lengths = chunks.positions[chunks.last_indexes][:, None] + 1
        result = choose(last_logits, self._sampler_tensors(fields, lengths, masks), stages)
        if not stages.prompt_logprobs:
            return result
        return torch.cat([result, prompt_logprobs(logits, chunks.next_ids)])

    def decode(self, state: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
        """One token for every slot, or for the first ones.

        Args:
            state: int32 [2, B], the last token and the length of each of these slots.
            context_len: how many positions are read.

        Returns:
            The best tokens, see `choose_greedily`, and the state of the next step.
        """
        tokens, positions = state
        result = choose_greedily(self._token_logits(tokens, positions, context_len))
        return result, self._next_state(result, positions)

    def decode_sampled(
        self, state: Tensor, context_len: int, sampler: Tensor, masks: Tensor, stages: Stages
    ) -> tuple[Tensor, Tensor]:
        """The sampler's choice, see `choose`, and the next state; arguments as for `decode` and `prefill_sampled`.

        Where `sampler` brings a state with it, that holds.
        """
        fields = unpack_sampler(sampler)
        host_state = torch.stack([fields["token_id"][:, 0], fields["slot_len"][:, 0]]).int()
        tokens, positions = torch.where(fields["is_from_host"][:, 0] > 0, host_state, state)
        if stages.penalties:
            slots = self._slots[: len(tokens)]
            self._counts.index_put_((slots, tokens), fields["is_stepped"][:, 0].int(), accumulate=True)
        logits = self._token_logits(tokens, positions, context_len)
        result = choose(logits, self._sampler_tensors(fields, positions[:, None] + 1, masks), stages)
        return result, self._next_state(result, positions)

    def _next_state(self, result: Tensor, positions: Tensor) -> Tensor:
        """A slot that is full writes its last position again and again, which nobody reads any more."""
        next_positions = (positions + 1).clamp(max=self._cache.max_slot_len - 1)
        return torch.stack([result[: len(positions)].int(), next_positions])

    def _prompt_logits(self, chunks: ChunkTensors, context_len: int | None, logits_to_keep: Tensor | int) -> Tensor:
        """[1, N, V] for a packed row."""
        places = Places(chunks.slots, chunks.write_positions)
        step: Step
        if context_len is None:
            parts = prompts_of_row(chunks.segments)
            step = PrefillStep(self._cache, chunks.segments, chunks.positions, places, parts)
        else:
            step = ChunkStep(self._cache, chunks.positions, places, context_len)
        with running(step):
            output = self._model(
                input_ids=chunks.token_ids[None],
                position_ids=chunks.positions[None],
                use_cache=False,
                logits_to_keep=logits_to_keep,
            )
        logits: Tensor = output.logits
        return logits

    def _token_logits(self, tokens: Tensor, positions: Tensor, context_len: int) -> Tensor:
        """[B, V] for one token in each slot, or in the first ones."""
        step = DecodeStep(self._cache, Places(self._slots[: len(tokens)], positions), context_len)
        with running(step):
            output = self._model(input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False)
        logits: Tensor = output.logits[:, 0]
        return logits

    def _count_prompts(self, chunks: ChunkTensors, is_stepped: Tensor) -> None:
        """Start the counts of the slots whose prompt begins, go on with those of the others that are stepped."""
        is_real = chunks.write_positions == chunks.positions  # padding, and a prompt that is not kept, go elsewhere
        is_begun = (chunks.is_begun > 0) & is_stepped
        self._counts.copy_(torch.where(is_begun[:, None], 0, self._counts))
        is_counted = is_real & is_stepped[chunks.slots]
        self._counts.index_put_((chunks.slots, chunks.token_ids), is_counted.int(), accumulate=True)

    def _sampler_tensors(self, fields: dict[str, Tensor], lengths: Tensor, masks: Tensor) -> SamplerTensors:
        return SamplerTensors(
            counts=self._counts[: len(lengths)],
            lengths=lengths,
            allowed=masks[0],
            favoured=masks[1],
            watermark_delta=self._watermark_delta,
            **{name: fields[name] for name in CHOICE_FIELDS},
        )
