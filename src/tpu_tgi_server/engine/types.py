"""What crosses the borders of the engine: requests in, generations out.

Plain values, free of protobuf and torch, so that every room above can import them cheaply.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

LIVENESS_ID = 2**64 - 1
"""The request id of TGI's liveness probe: answered in its Prefill, and nothing of it is kept."""


class GrammarType(IntEnum):
    """How `Sampling.grammar` is written; the values are TGI's."""

    NONE = 0
    JSON = 1
    REGEX = 2


class FinishReason(IntEnum):
    """Why a request ended; the values are TGI's."""

    LENGTH = 0
    EOS_TOKEN = 1
    STOP_SEQUENCE = 2


GrammarSource = tuple[str, GrammarType]
"""A grammar as a request brings it."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are neutral.

    0 in temperature, top_p, typical_p or repetition_penalty means unset, as neutral as 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    do_sample: bool = False
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    watermark: bool = False
    grammar: str = ""
    grammar_type: GrammarType = GrammarType.NONE

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn. `top_k` alone does not make it so: clients send it with greedy requests."""
        filters = (self.temperature, self.top_p, self.typical_p)
        return self.do_sample or any(value not in (0, 1) for value in filters)

    @property
    def has_penalty(self) -> bool:
        """Whether the choice depends on what the slot has seen."""
        return self.repetition_penalty not in (0, 1) or self.frequency_penalty != 0

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar says which tokens may come."""
        return self.grammar_type is not GrammarType.NONE and self.grammar != ""


@dataclass(frozen=True)
class Stopping:
    """When a request ends."""

    max_new_tokens: int
    stop_sequences: tuple[str, ...] = ()
    ignore_eos_token: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt and what is asked of it.

    `truncate` is the largest number of prompt tokens, 0 for no limit. `add_special_tokens` is None where the wire
    format has no such field.
    """

    id: int
    inputs: str
    stopping: Stopping
    sampling: Sampling = field(default_factory=Sampling)
    truncate: int = 0
    prefill_logprobs: bool = False
    top_n_tokens: int = 0
    add_special_tokens: bool | None = None

    @property
    def needs_host(self) -> bool:
        """Whether each token must be known on the host before the next is chosen."""
        return self.sampling.has_grammar or self.sampling.watermark

    @property
    def needs_sampler(self) -> bool:
        """Whether the greedy choice alone does not serve it."""
        sampling = self.sampling
        return (
            sampling.is_sampled
            or sampling.has_penalty
            or sampling.watermark
            or sampling.has_grammar
            or self.prefill_logprobs
            or self.top_n_tokens > 0
        )


@dataclass(frozen=True)
class Batch:
    """New requests that arrive together and share a batch id."""

    id: int
    requests: tuple[Request, ...]

    @property
    def is_liveness_probe(self) -> bool:
        """The reserved id, alone: TGI's router asks this to see whether the shard is alive."""
        return [request.id for request in self.requests] == [LIVENESS_ID]

    @property
    def grammars(self) -> tuple[GrammarSource, ...]:
        """Those that its requests must obey."""
        samplings = (request.sampling for request in self.requests)
        return tuple((sampling.grammar, sampling.grammar_type) for sampling in samplings if sampling.has_grammar)


@dataclass(frozen=True)
class CachedBatch:
    """A batch that the engine holds. `max_tokens` is what it reserves of the router's token budget."""

    id: int
    request_ids: tuple[int, ...]
    max_tokens: int

    @property
    def size(self) -> int:
        """The number of requests that are still live."""
        return len(self.request_ids)


class Tokens(NamedTuple):
    """Parallel lists, one entry for each token.

    This, `GeneratedText` and `Generation` are made for every slot in every step: named tuples are made and pickled in
    a third of the time of dataclasses.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    texts: tuple[str, ...]
    is_special: tuple[bool, ...]


class GeneratedText(NamedTuple):
    """The end of a request. `seed` is None unless tokens were sampled."""

    text: str
    num_generated_tokens: int
    finish_reason: FinishReason
    seed: int | None = None


class Generation(NamedTuple):
    """What one step brought for one request; `generated_text` is present exactly at its end."""

    request_id: int
    tokens: Tokens
    prefill_tokens: Tokens | None = None
    generated_text: GeneratedText | None = None
    top_tokens: tuple[Tokens, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """The answer to a prefill or a decode. `batch` is None when no request of it is live any more.

    Times are in nanoseconds: `concat_ns` to merge batches, `forward_ns` in the model, `total_ns` overall.
    """

    generations: tuple[Generation, ...]
    batch: CachedBatch | None
    concat_ns: int
    forward_ns: int
    total_ns: int

    @property
    def decode_ns(self) -> int:
        """The rest: text, grammars, bookkeeping."""
        return self.total_ns - self.forward_ns - self.concat_ns


@dataclass(frozen=True)
class Limits:
    """The static sizes that everything is compiled for, in tokens and slots."""

    num_slots: int
    max_input_tokens: int
    max_total_tokens: int

    @property
    def num_cached_tokens(self) -> int:
        """What all slots hold together."""
        return self.num_slots * self.max_total_tokens


@dataclass(frozen=True)
class Pace:
    """How much one call does, so that others need not wait long.

    Attributes:
        prefill_tokens: prompt tokens that one Prefill or Decode prefills at most.
        decode_steps: tokens that one Decode computes at most for each request.
    """

    prefill_tokens: int = 512
    decode_steps: int = 1


@dataclass(frozen=True)
class ModelInfo:
    """What others want to know of a loaded model.

    `folder` is where its files are; `sliding_window` is None where attention sees everything.
    """

    folder: str
    dtype: str
    device_type: str
    limits: Limits
    sliding_window: int | None


class ErrorKind(Enum):
    """What kind of refusal an `EngineError` is, for the room that answers the client."""

    INVALID = "invalid"
    UNKNOWN_BATCH = "unknown batch"
    BUSY = "busy"
    TOO_LARGE = "too large"


class EngineError(Exception):
    """A call that was refused as a whole. Nothing has changed, and other requests go on."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message
