"""The choice of the next token, on the device, for all slots at once.

The order is TGI's: watermark, repetition penalty, frequency penalty, grammar, temperature, top-k, top-p, typical-p,
choice. Log-probabilities are always `log_softmax` of the raw logits in float32, whatever the choice was made from.

Filters find a cutoff and compare the scores with it, so nothing is scattered back, which is slow on a TPU.
Shapes: B slots, V vocabulary, N top tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tpu_tgi_server.model.interface import MAX_TOP_TOKENS

MAX_SCORE = 1e30
"""Scores are kept within this, so that no difference of two overflows, and only a grammar makes one infinite."""


@dataclass(frozen=True)
class Stages:
    """Which parts of the sampler run. Compiled graphs have all of them, so that one graph serves every mix."""

    watermark: bool = True
    penalties: bool = True
    grammar: bool = True
    top_k: bool = True
    top_p: bool = True
    typical_p: bool = True
    sampling: bool = True
    top_tokens: bool = True
    prompt_logprobs: bool = True


ALL_STAGES = Stages()


@dataclass(frozen=True)
class SamplerTensors:
    """What each slot asks for, on the device; every tensor float32 [B, 1] unless said otherwise.

    Attributes:
        counts: int32 [B, V], how often each token is in the slot's prompt and output.
        lengths: int32 [B, 1], how many tokens that is in all.
        allowed: int32 [B, ceil(V / 32)], bit set where the grammar allows a token.
        favoured: int32 [B, ceil(V / 32)], bit set where the watermark favours a token.
        watermark_delta: what is added to the scores of favoured tokens.
        uniform: in [0, 1), the randomness of this step.
    """

    counts: Tensor
    lengths: Tensor
    allowed: Tensor
    favoured: Tensor
    watermark_delta: float
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    typical_p: Tensor
    is_sampled: Tensor
    uniform: Tensor


def choose_greedily(logits: Tensor) -> Tensor:
    """The best token of each row and its log-probability.

    Args:
        logits: [B, V], the model's raw logits.

    Returns:
        float32 [2 B]: ids (exact, as a vocabulary has less than 2**24 entries) and `log_softmax` at them, in one
        tensor so that one transfer brings both.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.max(logprobs, dim=-1)
    return torch.cat([best.indices.float(), best.values])


def choose(logits: Tensor, inputs: SamplerTensors, stages: Stages) -> Tensor:
    """The chosen token of each row, its log-probability, and the best tokens with theirs.

    Args:
        logits: [B, V], the model's raw logits.
        inputs: what each slot asks for.
        stages: what may be left out because no slot asks for it.

    Returns:
        float32 [2 B + 2 B N]: ids, log-probabilities, top ids row by row, top log-probabilities row by row, where N is
        the smaller of MAX_TOP_TOKENS and V, or 0 without the stage.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    scores = process_scores(logits.float(), inputs, stages)
    ids = torch.argmax(scores, dim=-1, keepdim=True)
    if stages.sampling:
        sampled = draw(filtered_probabilities(scores, inputs, stages), inputs.uniform)
        ids = torch.where(inputs.is_sampled > 0, sampled, ids)
    parts = [ids.float().reshape(-1), logprobs.gather(-1, ids).reshape(-1)]
    if stages.top_tokens:
        top = torch.topk(logprobs, min(MAX_TOP_TOKENS, logits.shape[-1]), dim=-1)
        parts += [top.indices.float().reshape(-1), top.values.reshape(-1)]
    return torch.cat(parts)


def process_scores(scores: Tensor, inputs: SamplerTensors, stages: Stages) -> Tensor:
    """Everything that a greedy choice obeys too: watermark, penalties, grammar. float32 [B, V] in and out."""
    if stages.watermark:
        scores = scores + inputs.watermark_delta * unpack_bits(inputs.favoured, scores.shape[-1])
    if stages.penalties:
        scores = penalise_repetition(scores, inputs.counts, inputs.repetition_penalty)
        scores = penalise_frequency(scores, inputs.counts, inputs.lengths, inputs.frequency_penalty)
    scores = bound(scores)
    if stages.grammar:
        scores = scores.masked_fill(~unpack_bits(inputs.allowed, scores.shape[-1]), -torch.inf)
    return scores


def penalise_repetition(scores: Tensor, counts: Tensor, penalty: Tensor) -> Tensor:
    """Tokens seen before: divide positive scores, multiply negative ones (Keskar et al. 2019, CTRL)."""
    return torch.where(counts > 0, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def penalise_frequency(scores: Tensor, counts: Tensor, lengths: Tensor, penalty: Tensor) -> Tensor:
    """Subtract the penalty times the token's share of the sequence so far (TGI's batched rule)."""
    return scores - penalty * (counts / lengths)


def bound(scores: Tensor) -> Tensor:
    """Finite scores, whatever an extreme penalty or the model has made of them: what is not a number comes last."""
    return scores.masked_fill(scores.isnan(), -MAX_SCORE).clamp(-MAX_SCORE, MAX_SCORE)


def filtered_probabilities(scores: Tensor, inputs: SamplerTensors, stages: Stages) -> Tensor:
    """Temperature, top-k, top-p and typical-p: what is left to draw from.

    Returns:
        float32 [B, V], probabilities of the kept tokens, not normalised again; 0 for the others.
    """
    # the shift keeps a very small temperature from overflowing, and changes no probability
    scores = (scores - scores.amax(-1, keepdim=True)) / inputs.temperature
    if stages.top_k:
        scores = keep_top_k(scores, inputs.top_k)
    if stages.top_p:
        scores = keep_top_p(scores, inputs.top_p)
    probabilities = torch.softmax(scores, dim=-1)
    if stages.typical_p:
        probabilities = probabilities * is_typical(probabilities, inputs.typical_p)
    return probabilities


def keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """The k best scores and those that tie with them, -inf for the others.

    Args:
        scores: float32 [B, V], the best 0.
        top_k: float32 [B, 1], 0 for all.
    """
    vocab_size = scores.shape[-1]
    num_kept = torch.where(top_k == 0, vocab_size, top_k.clamp(max=vocab_size))
    return scores.masked_fill(-scores > least_reaching(-scores, torch.ones_like(scores), num_kept), -torch.inf)


def keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """The best scores until their mass reaches p (Holtzman et al. 2020), and ties; -inf for the others.

    Args:
        scores: float32 [B, V], the best 0.
        top_p: float32 [B, 1], 1 for all.
    """
    farthest = least_reaching(-scores, torch.softmax(scores, dim=-1), top_p)
    return scores.masked_fill((-scores > farthest) & (top_p < 1), -torch.inf)


def is_typical(probabilities: Tensor, typical_p: Tensor) -> Tensor:
    """bool [B, V]: the tokens with the surprise nearest to the entropy, until their mass is p (Meister et al. 2023)."""
    surprise = -probabilities.log()
    entropy = torch.where(probabilities > 0, probabilities * surprise, 0.0).sum(-1, keepdim=True)
    distances = (surprise - entropy).abs()
    return (distances <= least_reaching(distances, probabilities, typical_p)) | (typical_p >= 1)


def least_reaching(values: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """The least value up to which the weights reach a mass; infinite if they never do.

    Args:
        values: float32 [B, V], 0 or more, may be infinite.
        weights: float32 [B, V], 0 or more.
        mass: float32 [B, 1], more than 0.

    Returns:
        float32 [B, 1], one of the values.
    """
    find = least_by_search if values.device.type == "xla" else least_by_rank
    return find(values, weights, mass)


def least_by_rank(values: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """`least_reaching` by sorting, which is fast on the CPU."""
    ranked = values.sort(dim=-1)
    is_short = weights.gather(-1, ranked.indices).cumsum(-1) < mass
    return ranked.values.masked_fill(is_short, torch.inf).amin(-1, keepdim=True)


def least_by_search(values: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
    """`least_reaching` by a binary search over all numbers of float32: the exponent, then each bit of the fraction.

    It sorts nothing, which TPUs and their compiler take long for. Values below 2**-126 count as 0.
    """

    def is_short(bound: Tensor | float) -> Tensor:
        return torch.where(values <= bound, weights, 0.0).sum(-1, keepdim=True) < mass

    power = torch.full_like(mass, torch.finfo(torch.float32).tiny)
    for exponent in (64, 64, 64, 32, 16, 8, 4, 2, 1):
        power = torch.where(is_short(power * 2.0**exponent), power * 2.0**exponent, power)
    bound = power
    for exponent in range(1, 24):
        larger = bound + power * 2.0**-exponent
        bound = torch.where(is_short(larger), larger, bound)
    largest_short = torch.where(is_short(bound), bound, torch.where(is_short(0.0), 0.0, -1.0))
    return torch.where(values > largest_short, values, torch.inf).amin(-1, keepdim=True)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: int64 [B, 1], the first token whose cumulative mass exceeds `uniform`.

    A parallel cumulative sum may fall a rounding error where it should stay level, so only tokens with mass count.
    """
    vocab_size = probabilities.shape[-1]
    cumulative = torch.where(probabilities > 0, probabilities.cumsum(-1), 0.0)
    is_past = cumulative > uniform * cumulative.amax(-1, keepdim=True)
    columns = torch.arange(vocab_size, dtype=torch.int32, device=probabilities.device)
    first = torch.where(is_past, columns, vocab_size - 1).amin(-1, keepdim=True)
    return first.long()


def unpack_bits(packed: Tensor, num_bits: int) -> Tensor:
    """bool [B, num_bits] from int32 [B, ceil(num_bits / 32)], lowest bit first.

    By masks and not by shifts: torch_xla 2.9 shifts a negative int32 to the right wrongly on the CPU.
    """
    powers = torch.bitwise_left_shift(
        torch.ones(32, dtype=torch.int32, device=packed.device),
        torch.arange(32, dtype=torch.int32, device=packed.device),
    )
    bits = (packed[:, :, None] & powers) != 0
    return bits.reshape(packed.shape[0], -1)[:, :num_bits]


def prompt_logprobs(logits: Tensor, next_ids: Tensor) -> Tensor:
    """What the model thought of the tokens that really came next.

    Args:
        logits: [T, V], raw.
        next_ids: int [T].

    Returns:
        float32 [T], `log_softmax` at `next_ids`.
    """
    logits = logits.float()
    chosen = logits.gather(-1, next_ids.long()[:, None])[:, 0]
    return chosen - torch.logsumexp(logits, dim=-1)
