"""What runs on the device in one step, written as plain torch: the model, then the choice of tokens.

Inputs are the packed vectors of `model.packing`; results are one float32 vector each. Nothing here reads a value back.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tpu_tgi_server.model.attention import DecodeStep, PrefillStep
from tpu_tgi_server.model.cache import StaticCacheXla
from tpu_tgi_server.model.packing import NUM_PROMPT_FIELDS, unpack_sampler
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

    def prefill(self, prompts: Tensor) -> Tensor:
        """Prompts of `pack_prompts`, int32 [5 T + B]; best tokens: see `choose_greedily`."""
        return choose_greedily(self._prompt_logits(prompts, prompts[-self.num_slots :])[0])

    def prefill_sampled(self, prompts: Tensor, sampler: Tensor, masks: Tensor, stages: Stages) -> Tensor:
        """The sampler's choice after a prefill: see `choose`, then [T] of `prompt_logprobs`.

        Args:
            prompts: int32 [5 T + B], see `pack_prompts`.
            sampler: float32 [9, B], see `pack_sampler`.
            masks: int32 [2, B, ceil(V / 32)], allowed and favoured tokens.
            stages: what may be left out.
        """
        last_indexes = prompts[-self.num_slots :]
        tokens, _, positions, slots, cells = prompts[: -self.num_slots].reshape(NUM_PROMPT_FIELDS, -1)
        fields = unpack_sampler(sampler)
        is_started = fields.pop("is_stepped") > 0
        if stages.penalties:
            is_real = cells == positions  # padding, and a prompt that is not kept, go to another cell
            self._count_prompts(tokens, slots, is_real & is_started[slots, 0], is_started)
        logits = self._prompt_logits(prompts, 0 if stages.prompt_logprobs else last_indexes)[0]
        last_logits = logits[last_indexes] if stages.prompt_logprobs else logits
        lengths = positions[last_indexes][:, None] + 1
        result = choose(last_logits, self._sampler_tensors(fields, lengths, masks), stages)
        if not stages.prompt_logprobs:
            return result
        return torch.cat([result, prompt_logprobs(logits, torch.roll(tokens, -1))])

    def decode(self, tokens_and_lens: Tensor, context_len: int) -> Tensor:
        """`tokens_and_lens` is int32 [2, B], tokens and slot lengths; best tokens: see `choose_greedily`."""
        tokens, positions = tokens_and_lens
        return choose_greedily(self._token_logits(tokens, positions, context_len))

    def decode_sampled(
        self, tokens_and_lens: Tensor, context_len: int, sampler: Tensor, masks: Tensor, stages: Stages
    ) -> Tensor:
        """The sampler's choice after a decode, see `choose`; arguments as for `decode` and `prefill_sampled`."""
        tokens, positions = tokens_and_lens
        fields = unpack_sampler(sampler)
        is_stepped = fields.pop("is_stepped")
        if stages.penalties:
            self._counts.index_put_((self._slots, tokens), is_stepped[:, 0].int(), accumulate=True)
        logits = self._token_logits(tokens, positions, context_len)
        return choose(logits, self._sampler_tensors(fields, positions[:, None] + 1, masks), stages)

    def _prompt_logits(self, prompts: Tensor, logits_to_keep: Tensor | int) -> Tensor:
        """[1, N, V] for the packed prompts of `pack_prompts`."""
        tokens, segments, positions, slots, cells = prompts[: -self.num_slots].reshape(NUM_PROMPT_FIELDS, -1)
        step = PrefillStep(self._cache, segments=segments, positions=positions, slots=slots, cells=cells)
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_to_keep,
            slot_step=step,
        )
        logits: Tensor = output.logits
        return logits

    def _token_logits(self, tokens: Tensor, positions: Tensor, context_len: int) -> Tensor:
        """[B, V] for one token in each slot."""
        step = DecodeStep(self._cache, positions=positions, slots=self._slots, context_len=context_len)
        output = self._model(
            input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, slot_step=step
        )
        logits: Tensor = output.logits[:, 0]
        return logits

    def _count_prompts(self, tokens: Tensor, slots: Tensor, is_counted: Tensor, is_started: Tensor) -> None:
        """Start the counts of the slots that begin with this prefill, and leave the others as they are."""
        fresh = torch.zeros_like(self._counts)
        fresh.index_put_((slots, tokens), is_counted.int(), accumulate=True)
        self._counts.copy_(torch.where(is_started, fresh, self._counts))

    def _sampler_tensors(self, fields: dict[str, Tensor], lengths: Tensor, masks: Tensor) -> SamplerTensors:
        return SamplerTensors(
            counts=self._counts,
            lengths=lengths,
            allowed=masks[0],
            favoured=masks[1],
            watermark_delta=self._watermark_delta,
            **fields,
        )
