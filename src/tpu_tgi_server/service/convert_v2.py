"""generate.v2 messages to the engine's dataclasses, and back."""

from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    FinishReason,
    GeneratedText,
    Generation,
    GrammarType,
    ModelInfo,
    Request,
    Sampling,
    StepResult,
    Stopping,
    Tokens,
)
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


def batch_from_pb(batch: pb.Batch) -> Batch:
    """`size` and `max_tokens` are the router's own arithmetic, which no shard uses."""
    return Batch(batch.id, tuple(_request_from_pb(request) for request in batch.requests))


def cached_batch_from_pb(batch: pb.CachedBatch) -> CachedBatch:
    return CachedBatch(batch.id, tuple(batch.request_ids), batch.max_tokens)


def cached_batch_to_pb(batch: CachedBatch | None) -> pb.CachedBatch | None:
    if batch is None:
        return None
    return pb.CachedBatch(id=batch.id, request_ids=batch.request_ids, size=batch.size, max_tokens=batch.max_tokens)


def prefill_response(result: StepResult) -> pb.PrefillResponse:
    return pb.PrefillResponse(
        generations=map(_generation_to_pb, result.generations),
        batch=cached_batch_to_pb(result.batch),
        forward_ns=result.forward_ns,
        decode_ns=result.total_ns - result.forward_ns,
        total_ns=result.total_ns,
    )


def decode_response(result: StepResult) -> pb.DecodeResponse:
    return pb.DecodeResponse(
        generations=map(_generation_to_pb, result.generations),
        batch=cached_batch_to_pb(result.batch),
        forward_ns=result.forward_ns,
        decode_ns=result.total_ns - result.forward_ns,
        total_ns=result.total_ns,
    )


def info_response(info: ModelInfo) -> pb.InfoResponse:
    """`requires_padding` makes the router count slots of full length, which is what they are."""
    return pb.InfoResponse(
        requires_padding=True,
        dtype=info.dtype,
        device_type=info.device_type,
        window_size=info.sliding_window,
        speculate=0,
    )


def _request_from_pb(request: pb.Request) -> Request:
    chooser = request.parameters
    stopping = request.stopping_parameters
    return Request(
        id=request.id,
        inputs=request.inputs,
        truncate=request.truncate,
        sampling=Sampling(
            temperature=chooser.temperature,
            top_k=chooser.top_k,
            top_p=chooser.top_p,
            typical_p=chooser.typical_p,
            do_sample=chooser.do_sample,
            seed=chooser.seed,
            repetition_penalty=chooser.repetition_penalty,
            frequency_penalty=chooser.frequency_penalty,
            watermark=chooser.watermark,
            grammar=chooser.grammar,
            grammar_type=_grammar_type(request.id, chooser.grammar_type),
        ),
        stopping=Stopping(
            max_new_tokens=stopping.max_new_tokens,
            stop_sequences=tuple(stopping.stop_sequences),
            ignore_eos_token=stopping.ignore_eos_token,
        ),
        prefill_logprobs=request.prefill_logprobs,
        top_n_tokens=request.top_n_tokens,
    )


def _grammar_type(request_id: int, value: int) -> GrammarType:
    try:
        return GrammarType(value)
    except ValueError:
        raise EngineError(ErrorKind.INVALID, f"request {request_id}: grammar_type {value} is not known") from None


def _generation_to_pb(generation: Generation) -> pb.Generation:
    return pb.Generation(
        request_id=generation.request_id,
        prefill_tokens=_tokens_to_pb(generation.prefill_tokens) if generation.prefill_tokens else None,
        tokens=_tokens_to_pb(generation.tokens),
        generated_text=_text_to_pb(generation.generated_text) if generation.generated_text else None,
        top_tokens=map(_tokens_to_pb, generation.top_tokens),
    )


def _tokens_to_pb(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(ids=tokens.ids, logprobs=tokens.logprobs, texts=tokens.texts, is_special=tokens.is_special)


def _text_to_pb(text: GeneratedText) -> pb.GeneratedText:
    return pb.GeneratedText(
        text=text.text,
        generated_tokens=text.num_generated_tokens,
        finish_reason=_FINISH_REASONS[text.finish_reason],
        seed=text.seed,
    )


_FINISH_REASONS = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_SEQUENCE,
}
