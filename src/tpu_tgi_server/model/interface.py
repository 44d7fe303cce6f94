"""What the engine may ask of a model: a prefill, a decode step, and what they cost to warm up.

Free of torch, so that tests can drive the engine with a scripted model that runs nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One prompt to prefill.

    Its keys and values go to `slot`, from position 0 on. With `is_kept` False they all go to the one position
    `slot_len`, which nobody reads: that is how a prompt is answered while its slot belongs to another request.
    """

    slot: int
    token_ids: Sequence[int]
    is_kept: bool = True
    slot_len: int = 0


@dataclass(frozen=True)
class NextTokens:
    """The chosen next tokens: after a prefill one a prompt, after a decode one a slot.

    Attributes:
        ids: int32 [N].
        logprobs: float32 [N], `log_softmax` of the model's raw logits at the chosen ids.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True)
class Graph:
    """One compiled shape: a prefill of `num_tokens` packed tokens, or a decode that reads `context_len` positions."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


OnGraph = Callable[[Graph, int, int], None]
"""Called after each warmed-up graph with the graph, its number from 1, and how many there are."""


class Model(Protocol):
    """A model with a cache of `num_slots` slots of `max_total_tokens` positions each.

    The cells of a slot at its length and beyond are scratch: a step may write there, and never reads a cell that the
    slot's own request has not written.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def max_prefill_tokens(self) -> int:
        """How many prompt tokens fit one prefill together."""
        ...

    def prefill(self, prompts: Sequence[Prompt]) -> NextTokens:
        """Run the prompts in one execution. Together they have at most `max_prefill_tokens` tokens."""
        ...

    def decode(self, token_ids: NDArray[np.int32], slot_lens: NDArray[np.int32], max_slot_len: int) -> NextTokens:
        """Run one token for every slot in one execution.

        Args:
            token_ids: int32 [B], the last token of each slot; anything for slots that are not stepped.
            slot_lens: int32 [B], how many positions of each slot are written; the token goes to that position.
            max_slot_len: the largest of `slot_lens` among the slots whose result matters.
        """
        ...

    def warm_up(self, on_graph: OnGraph) -> None:
        """Run every graph once. Overwrites the cache, so no slot may be in use."""
        ...
