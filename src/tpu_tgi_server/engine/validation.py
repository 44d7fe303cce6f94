"""What a request may ask for. A refusal names the field, and refuses the call as a whole."""

from collections.abc import Sequence

from tpu_tgi_server.engine.types import Batch, EngineError, ErrorKind, Limits, Request

NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (0, 1),
    "typical_p": (0, 1),
    "do_sample": (False,),
    "repetition_penalty": (0, 1),
    "frequency_penalty": (0,),
    "watermark": (False,),
    "grammar": ("",),
}
"""Sampling fields that are not built yet, with the values that ask for nothing."""


def check_batch(batch: Batch, live_request_ids: Sequence[int]) -> None:
    """Refuse a batch whose requests cannot be told apart.

    Raises:
        EngineError: INVALID, with the reason.
    """
    ids = [request.id for request in batch.requests]
    if not ids:
        raise _invalid("batch.requests is empty")
    repeated = {id for id in ids if ids.count(id) > 1} | set(ids).intersection(live_request_ids)
    if repeated:
        raise _invalid(f"request id {min(repeated)} is used twice")


def check_request(request: Request) -> None:
    """Refuse what is out of range or not built.

    Raises:
        EngineError: INVALID, naming the field.
    """
    if request.stopping.max_new_tokens < 1:
        raise _refused(request, "max_new_tokens must be at least 1")
    for name, neutral in NEUTRAL.items():
        if getattr(request.sampling, name) not in neutral:
            raise _refused(request, f"{name} is not supported")
    if request.stopping.stop_sequences:
        raise _refused(request, "stop_sequences is not supported")
    if request.prefill_logprobs:
        raise _refused(request, "prefill_logprobs is not supported")
    if request.top_n_tokens:
        raise _refused(request, "top_n_tokens is not supported")


def check_prompt(request: Request, prompt_len: int, limits: Limits) -> None:
    """Refuse a prompt of the wrong length, in tokens after truncation.

    Raises:
        EngineError: INVALID, naming the field and the limit.
    """
    if prompt_len == 0:
        raise _refused(request, "inputs has no tokens")
    if prompt_len > limits.max_input_tokens:
        raise _refused(
            request,
            f"inputs has {prompt_len} tokens, more than --max-input-tokens {limits.max_input_tokens} (see truncate)",
        )


def _refused(request: Request, reason: str) -> EngineError:
    return _invalid(f"request {request.id}: {reason}")


def _invalid(message: str) -> EngineError:
    return EngineError(ErrorKind.INVALID, message)
