"""What the engine may ask of a model: a prefill, a decode step, and what they cost to warm up.

Free of torch, so that tests can drive the engine with a scripted model that runs nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

MAX_TOP_TOKENS = 64
"""How many top tokens of each slot leave the device."""


@dataclass(frozen=True)
class PromptChunk:
    """A prompt to prefill, or the next part of a long one.

    Its keys and values go to `slot`, from position `start` on. With `is_kept` False they all go to the one position
    `scratch_position`, which nobody reads: that is how a prompt is answered while its slot belongs to another request.

    Attributes:
        next_id: the prompt's token after this chunk, whose log-probability the chunk's last token predicts; 0 if none.
    """

    slot: int
    token_ids: Sequence[int]
    start: int = 0
    next_id: int = 0
    is_kept: bool = True
    scratch_position: int = 0

    @property
    def end(self) -> int:
        """How many positions of the slot are written after it."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class SamplerInputs:
    """How each of B slots chooses its next token in one step, for steps in which some slot does not choose greedily.

    Rows of slots that are not part of the step hold anything finite.

    Attributes:
        top_k: int32 [B], 0 for off.
        is_sampled: int32 [B], 1 where the token is drawn and 0 where the best is taken.
        is_stepped: int32 [B], 1 for slots whose tokens of this step enter their history.
        temperature, top_p, typical_p, repetition_penalty, frequency_penalty: float32 [B].
        uniform: float32 [B] in [0, 1), the randomness of this step.
        allowed: int32 [B, ceil(V / 32)], one bit a token, set where a grammar allows it; None if no slot has one.
        favoured: int32 [B, ceil(V / 32)], set where a watermark favours a token; None if no slot has one.
        wants_top_tokens: some slot wants `NextTokens.top_ids`.
        wants_prompt_logprobs: some prompt wants `NextTokens.prompt_logprobs`.
    """

    top_k: NDArray[np.int32]
    is_sampled: NDArray[np.int32]
    is_stepped: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    typical_p: NDArray[np.float32]
    repetition_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    uniform: NDArray[np.float32]
    allowed: NDArray[np.int32] | None = None
    favoured: NDArray[np.int32] | None = None
    wants_top_tokens: bool = False
    wants_prompt_logprobs: bool = False


@dataclass(frozen=True)
class NextTokens:
    """The chosen next token of each slot; rows of slots that were not part of the step mean nothing.

    Attributes:
        ids: int32 [B].
        logprobs: float32 [B], `log_softmax` of the model's raw logits at the chosen ids.
        top_ids: int32 [B, N], best first; N is 0 where they were not wanted.
        top_logprobs: float32 [B, N].
        prompt_logprobs: for the slot of each chunk of a prefill float32 [T], what each of its tokens gave to the token
            that comes next in the prompt (after the prompt's last: means nothing); empty where they were not wanted.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    prompt_logprobs: Mapping[int, NDArray[np.float32]]


@dataclass(frozen=True)
class Graph:
    """One compiled shape: a prefill of `size` packed tokens, or a chunk or a decode that reads `size` positions.

    A chunk is the continuation of one long prompt, of as many tokens as the largest prefill. Each graph comes twice:
    with the greedy choice alone, and with the whole sampler.
    """

    kind: Literal["prefill", "chunk", "decode"]
    size: int
    has_sampler: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.size} {'sampled' if self.has_sampler else 'greedy'}"


ReadTokens = Callable[[], list[NextTokens]]
"""Waits until steps are done, and returns what they chose: one entry a step."""

OnGraph = Callable[[Graph, int, int], None]
"""Called after each warmed-up graph with the graph, its number from 1, and how many there are."""


class Model(Protocol):
    """A model with a cache of `num_slots` slots of `max_total_tokens` positions each.

    The positions of a slot at its length and beyond are scratch: a step may write there, as many as a prefill has
    tokens or as steps are started together, and never reads a position that the slot's own request has not written.
    Steps are carried out in the order in which they are started.
    """

    @property
    def vocab_size(self) -> int:
        """How many logits the model has: ids are below this."""
        ...

    @property
    def max_prefill_tokens(self) -> int:
        """How many prompt tokens fit one prefill together: the size of a chunk."""
        ...

    def prefill(self, chunks: Sequence[PromptChunk], sampler: SamplerInputs | None) -> NextTokens:
        """Run chunks in one execution. Together they have at most `max_prefill_tokens` tokens.

        A chunk with a `start` above 0 is run alone. Without a sampler every slot takes the best token and its history
        is not kept.
        """
        ...

    def decode(
        self,
        token_ids: NDArray[np.int32],
        slot_lens: NDArray[np.int32],
        num_used_slots: int,
        max_slot_len: int,
        samplers: Sequence[SamplerInputs | None],
    ) -> ReadTokens:
        """Start as many steps as there are samplers, one after the other, of one token for every slot each.

        Where nothing is compiled, slots behind the last whose result matters are left out, also of the result.

        Args:
            token_ids: int32 [B], the last token of each slot; anything for slots that are not stepped.
            slot_lens: int32 [B], how many positions of each slot are written; the token goes to that position, those
                of the following steps behind it. What would go beyond the slot's end goes to its last position.
            num_used_slots: how many slots there are up to the last one whose result matters.
            max_slot_len: the largest of `slot_lens` among the slots whose result matters.
            samplers: for each step as for `prefill`, all or none of them None. A slot with penalties must have a
                sampler in each of its steps.
        """
        ...

    def warm_up(self, on_graph: OnGraph) -> None:
        """Run every graph once. Overwrites the cache, so no slot may be in use."""
        ...
