"""What a request may ask for. A refusal names the field, and refuses the call as a whole."""

from collections import Counter
from collections.abc import Collection
from math import inf, isfinite

from tpu_tgi_server.engine.types import LIVENESS_ID, Batch, EngineError, ErrorKind, GrammarType, Limits, Request
from tpu_tgi_server.model.interface import MAX_TOP_TOKENS

MAX_DETAILS_BYTES = 3 * 2**20
"""Of all prompt details in one response. TGI's routers refuse responses of more than 4 MiB."""

SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, inf),
    "top_p": (0, 1),
    "typical_p": (0, 1),
    "repetition_penalty": (0, inf),
    "frequency_penalty": (-inf, inf),
}
"""The smallest and largest value of each number; 0 means unset except in frequency_penalty."""


def check_batch(batch: Batch, live_request_ids: Collection[int]) -> None:
    """Refuse a batch whose requests cannot be told apart.

    Raises:
        EngineError: INVALID, with the reason.
    """
    ids = [request.id for request in batch.requests]
    if not ids:
        raise _invalid("batch.requests is empty")
    repeated = {id for id, count in Counter(ids).items() if count > 1} | set(ids).intersection(live_request_ids)
    if repeated:
        raise _invalid(f"request id {min(repeated)} is used twice")
    if batch.is_liveness_probe and batch.requests[0].needs_sampler:
        raise _invalid(f"request id {LIVENESS_ID} is the liveness probe, which takes one token greedily")


def check_request(request: Request, vocab_size: int) -> None:
    """Refuse what is out of range.

    Raises:
        EngineError: INVALID, naming the field.
    """
    if request.stopping.max_new_tokens < 1:
        raise refused(request, "max_new_tokens must be at least 1")
    for name, (smallest, largest) in SAMPLING_RANGES.items():
        value: float = getattr(request.sampling, name)
        if not isfinite(value) or not smallest <= value <= largest:
            raise refused(request, f"{name} must be {_range_in_words(smallest, largest)}, not {value:g}")
    if vocab_size > MAX_TOP_TOKENS < request.top_n_tokens:
        raise refused(request, f"top_n_tokens must be at most {MAX_TOP_TOKENS}")
    if request.sampling.grammar and request.sampling.grammar_type is GrammarType.NONE:
        raise refused(request, "grammar needs a grammar_type")


def check_prompt(request: Request, prompt_len: int, limits: Limits) -> None:
    """Refuse a prompt of the wrong length, in tokens after truncation.

    Raises:
        EngineError: INVALID, naming the field and the limit.
    """
    if prompt_len == 0:
        raise refused(request, "inputs has no tokens")
    if prompt_len > limits.max_input_tokens:
        raise refused(
            request,
            f"inputs has {prompt_len} tokens, more than --max-input-tokens {limits.max_input_tokens} (see truncate)",
        )


def check_details(request: Request, prompt_len: int) -> None:
    """Refuse prompt details that no response holds.

    Raises:
        EngineError: INVALID, naming the field.
    """
    if request.prefill_logprobs and details_bytes(request, prompt_len) > MAX_DETAILS_BYTES:
        raise refused(request, f"prefill_logprobs of {prompt_len} tokens is more than a response of 4 MiB holds")


def details_bytes(request: Request, prompt_len: int) -> int:
    """At most so many bytes of a response are taken by the details of a prompt.

    A token takes up to 4 bytes of id, 4 of log-probability, 1 of flag and 3 around its text. All texts together are the
    prompt's, where a part of a character alone counts 3 bytes a byte, and special tokens that the tokenizer adds.
    """
    return 16 * prompt_len + 3 * min(len(request.inputs.encode()), 64 * prompt_len)


def check_vocabulary(request: Request, prompt_ids: Collection[int], vocab_size: int) -> None:
    """Refuse a prompt with tokens that the tokenizer has and the model has not.

    Raises:
        EngineError: INVALID, naming the field.
    """
    largest = max(prompt_ids)
    if largest >= vocab_size:
        raise refused(request, f"inputs has token {largest}, which is beyond the model's vocabulary of {vocab_size}")


def refused(request: Request, reason: str) -> EngineError:
    """A refusal that says which request it is about."""
    return _invalid(f"request {request.id}: {reason}")


def _range_in_words(smallest: float, largest: float) -> str:
    if isfinite(largest):
        return f"a number from {smallest:g} to {largest:g}"
    return f"a finite number, {smallest:g} or more" if isfinite(smallest) else "a finite number"


def _invalid(message: str) -> EngineError:
    return EngineError(ErrorKind.INVALID, message)
