"""From a request to a sequence that can start: checked, tokenised, with its grammar compiled."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import wait
from dataclasses import replace

from tpu_tgi_server.engine.grammar import GrammarCompiler, GrammarState
from tpu_tgi_server.engine.sequence import Sequence
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import Batch, EngineError, GrammarSource, Limits, Request
from tpu_tgi_server.engine.validation import (
    check_batch,
    check_details,
    check_prompt,
    check_request,
    check_vocabulary,
    refused,
)


class Admission:
    """Owns the tokenizer, the grammar compiler and the limits: all that decides whether a request can be served."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._vocab_size = vocab_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size)

    def prepare(self, grammars: SequenceOf[GrammarSource], timeout_s: float) -> bool:
        """Compile grammars in the background, waiting no longer than `timeout_s`.

        Returns:
            Whether `admit` finds them all compiled or refused, and need not wait.
        """
        return not wait(self._grammars.begin(grammars), timeout_s).not_done

    def admit(self, batch: Batch, live_request_ids: Collection[int]) -> list[Sequence]:
        """All requests of a batch, or none.

        Raises:
            EngineError: INVALID, naming the request and the field.
        """
        check_batch(batch, live_request_ids)
        if batch.is_liveness_probe:  # the v2 router truncates it to 10 tokens, whatever the longest prompt is
            (probe,) = batch.requests
            truncate = min(probe.truncate or self._limits.max_input_tokens, self._limits.max_input_tokens)
            return [self._admit(replace(probe, truncate=truncate))]
        return [self._admit(request) for request in batch.requests]

    def _admit(self, request: Request) -> Sequence:
        check_request(request, self._vocab_size)
        prompt_ids = self._tokenizer.encode(request.inputs, request.truncate, request.add_special_tokens)
        check_prompt(request, len(prompt_ids), self._limits)
        check_details(request, len(prompt_ids))
        check_vocabulary(request, prompt_ids, self._vocab_size)
        room = self._limits.max_total_tokens - len(prompt_ids)
        return Sequence(
            request=request,
            prompt_ids=prompt_ids,
            max_new_tokens=min(request.stopping.max_new_tokens, room),
            tokenizer=self._tokenizer,
            grammar=self._grammar(request),
        )

    def _grammar(self, request: Request) -> GrammarState | None:
        sampling = request.sampling
        if not sampling.has_grammar:
            return None
        try:
            return self._grammars.compile(sampling.grammar, sampling.grammar_type).start()
        except EngineError as error:
            raise refused(request, error.message) from error
        except ValueError as error:
            raise refused(request, f"grammar is not supported with this model: {error}") from error
