"""Messages of the protocol to the engine's dataclasses, and back.

Both versions name their messages and fields alike, so one `Converter` serves each with the module generated for it.
What only v3 has is in `v3.py`.
"""

from collections.abc import Callable
from typing import Any

from tpu_tgi_server.engine.types import (
    Batch,
    CachedBatch,
    EngineError,
    ErrorKind,
    GeneratedText,
    Generation,
    GrammarType,
    Request,
    Sampling,
    StepResult,
    Stopping,
    Tokens,
)

Message = Any
"""A protobuf message of either version."""


class Converter:
    """Owns nothing but the choice of the version.

    Args:
        pb: the generated module, `tpu_tgi_server.pb.v2.generate_pb2` or v3's.
        read_prompt: the prompt of a request, and whether special tokens are added (None: as the engine decides).
    """

    def __init__(self, pb: Any, read_prompt: Callable[[Message], tuple[str, bool | None]]) -> None:
        self.pb = pb
        self._read_prompt = read_prompt

    def batch(self, message: Message) -> Batch:
        """`size`, `max_tokens` and `max_blocks` are the router's own arithmetic, which no shard uses."""
        return Batch(message.id, tuple(self._request(request) for request in message.requests))

    def cached_batch(self, message: Message) -> CachedBatch:
        return CachedBatch(message.id, tuple(message.request_ids), message.max_tokens)

    def cached_batch_message(self, batch: CachedBatch | None) -> Message | None:
        if batch is None:
            return None
        return self.pb.CachedBatch(
            id=batch.id, request_ids=batch.request_ids, size=batch.size, max_tokens=batch.max_tokens
        )

    def prefill_response(self, result: StepResult) -> Message:
        return self.pb.PrefillResponse(**self._step_fields(result))

    def decode_response(self, result: StepResult) -> Message:
        return self.pb.DecodeResponse(**self._step_fields(result), concat_ns=result.concat_ns)

    def _step_fields(self, result: StepResult) -> dict[str, Any]:
        return {
            "generations": map(self._generation_message, result.generations),
            "batch": self.cached_batch_message(result.batch),
            "forward_ns": result.forward_ns,
            "decode_ns": result.decode_ns,
            "total_ns": result.total_ns,
        }

    def _request(self, message: Message) -> Request:
        inputs, add_special_tokens = self._read_prompt(message)
        chooser = message.parameters
        stopping = message.stopping_parameters
        return Request(
            id=message.id,
            inputs=inputs,
            truncate=message.truncate,
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
                grammar_type=_grammar_type(message.id, chooser.grammar_type),
            ),
            stopping=Stopping(
                max_new_tokens=stopping.max_new_tokens,
                stop_sequences=tuple(stopping.stop_sequences),
                ignore_eos_token=stopping.ignore_eos_token,
            ),
            prefill_logprobs=message.prefill_logprobs,
            top_n_tokens=message.top_n_tokens,
            add_special_tokens=add_special_tokens,
        )

    def _generation_message(self, generation: Generation) -> Message:
        return self.pb.Generation(
            request_id=generation.request_id,
            prefill_tokens=self._tokens_message(generation.prefill_tokens) if generation.prefill_tokens else None,
            tokens=self._tokens_message(generation.tokens),
            generated_text=self._text_message(generation.generated_text) if generation.generated_text else None,
            top_tokens=map(self._tokens_message, generation.top_tokens),
        )

    def _tokens_message(self, tokens: Tokens) -> Message:
        return self.pb.Tokens(
            ids=tokens.ids, logprobs=tokens.logprobs, texts=tokens.texts, is_special=tokens.is_special
        )

    def _text_message(self, text: GeneratedText) -> Message:
        return self.pb.GeneratedText(
            text=text.text,
            generated_tokens=text.num_generated_tokens,
            finish_reason=int(text.finish_reason),
            seed=text.seed,
        )


def _grammar_type(request_id: int, value: int) -> GrammarType:
    try:
        return GrammarType(value)
    except ValueError:
        raise EngineError(ErrorKind.INVALID, f"request {request_id}: grammar_type {value} is not known") from None
