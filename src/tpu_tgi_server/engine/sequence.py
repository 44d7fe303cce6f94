"""One request while it is live: its ids, its text so far, and when it ends."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import nan

import numpy as np
from loguru import logger

from tpu_tgi_server.engine.grammar import GrammarState
from tpu_tgi_server.engine.stopping import StopSequences, finish_reason
from tpu_tgi_server.engine.text import TextStream
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import FinishReason, GeneratedText, Generation, Request, Tokens
from tpu_tgi_server.model.interface import NextTokens


@dataclass(eq=False)
class Sequence:
    """Owns the token ids of one request. They are its whole state: nothing is ever tokenised twice.

    Attributes:
        request: what was asked.
        prompt_ids: the prompt after truncation.
        max_new_tokens: how many tokens may come, as asked or as the slot has room.
        grammar: what the next token must obey, or None.
        output_ids: what was generated so far.
        slot: where its keys and values are, or None while it waits for one.
        num_prefilled: how many tokens of the prompt are there.
    """

    request: Request
    prompt_ids: list[int]
    max_new_tokens: int
    tokenizer: Tokenizer
    grammar: GrammarState | None = None
    slot: int | None = None
    num_prefilled: int = 0

    def __post_init__(self) -> None:
        self.output_ids: list[int] = []
        self._prompt_logprobs: list[float] = []
        self._text = TextStream(self.tokenizer, self.prompt_ids)
        self._stops = StopSequences(self.request.stopping.stop_sequences)

    @property
    def last_id(self) -> int:
        """The newest token of prompt and output."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def slot_len(self) -> int:
        """How many positions of the slot are written: every token but the newest, which the next step writes."""
        return self.num_prefilled + max(len(self.output_ids) - 1, 0)

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is in the slot, so that tokens come."""
        return self.num_prefilled == len(self.prompt_ids)

    @property
    def num_left(self) -> int:
        """How many more tokens may come."""
        return self.max_new_tokens - len(self.output_ids)

    def take_prompt_logprobs(self, chosen: NextTokens) -> None:
        """Keep what a chunk of the prompt gave to the tokens that follow in it, for `append`."""
        if self.slot is not None and self.request.prefill_logprobs:
            self._prompt_logprobs += chosen.prompt_logprobs[self.slot].tolist()

    def append(self, steps: SequenceOf[NextTokens], row: int) -> Generation:
        """Take tokens from a row of the results of steps, until it ends, and say what they bring to the client."""
        is_first = not self.output_ids
        ids: list[int] = []
        logprobs: list[float] = []
        texts: list[str] = []
        top_tokens: list[Tokens] = []
        reason = None
        for chosen in steps:
            ids.append(int(chosen.ids[row]))
            logprobs.append(float(chosen.logprobs[row]))
            top_tokens += self._top_tokens(chosen, row)
            self.output_ids.append(ids[-1])
            texts.append(self._text.push(ids[-1]))
            reason = self._finish_reason(ids[-1], texts[-1])
            if reason is not None:
                texts[-1] += self._text.flush()
                break
        return Generation(
            request_id=self.request.id,
            tokens=Tokens(tuple(ids), tuple(logprobs), tuple(texts), tuple(map(self._is_special, ids))),
            prefill_tokens=self._prefill_tokens() if is_first else None,
            generated_text=None if reason is None else self._generated_text(reason),
            top_tokens=tuple(top_tokens),
        )

    def _finish_reason(self, token_id: int, text: str) -> FinishReason | None:
        is_eos = token_id in self.tokenizer.eos_ids and not self.request.stopping.ignore_eos_token
        if self.grammar is not None:
            self.grammar.advance(token_id)
            is_eos |= self.grammar.is_finished
            if self.grammar.failure is not None:
                logger.debug("request {} ends early: {}", self.request.id, self.grammar.failure)
        is_stopped = self._stops.found_with(text)
        return finish_reason(is_eos, is_stopped, len(self.output_ids), self.max_new_tokens)

    def _generated_text(self, reason: FinishReason) -> GeneratedText:
        sampling = self.request.sampling
        seed = sampling.seed if sampling.is_sampled else None
        return GeneratedText(self._text.generated_text(), len(self.output_ids), reason, seed)

    def _prefill_tokens(self) -> Tokens | None:
        """The prompt's tokens. The first has no log-probability: nothing comes before it."""
        if not self.request.prefill_logprobs:
            return None
        return self._tokens(self.prompt_ids, [nan, *self._prompt_logprobs[:-1]])

    def _top_tokens(self, chosen: NextTokens, row: int) -> tuple[Tokens, ...]:
        """The best tokens for this position, best first, ties with the last of them included."""
        num_wanted = self.request.top_n_tokens
        if not num_wanted:
            return ()
        logprobs = chosen.top_logprobs[row]
        threshold = logprobs[min(num_wanted, len(logprobs)) - 1]
        num_best = int(np.count_nonzero((logprobs >= threshold) & (logprobs > -np.inf)))
        return (self._tokens(chosen.top_ids[row, :num_best].tolist(), logprobs[:num_best].tolist()),)

    def _tokens(self, ids: list[int], logprobs: list[float]) -> Tokens:
        """Tokens with the text that each has alone."""
        texts = (self.tokenizer.decode([id]) for id in ids)
        return Tokens(tuple(ids), tuple(logprobs), tuple(texts), tuple(map(self._is_special, ids)))

    def _is_special(self, token_id: int) -> bool:
        return token_id in self.tokenizer.special_ids
