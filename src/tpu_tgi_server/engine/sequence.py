"""One request while it is live: its ids, its text so far, and when it ends."""

from tpu_tgi_server.engine.text import TextStream
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import FinishReason, GeneratedText, Generation, Request, Tokens


class Sequence:
    """Owns the token ids of one request. They are its whole state: nothing is ever tokenised twice.

    Attributes:
        request: what was asked.
        prompt_ids: the prompt after truncation.
        output_ids: what was generated so far.
        slot: where its keys and values are, or None while it waits for one.
    """

    def __init__(self, request: Request, prompt_ids: list[int], tokenizer: Tokenizer, max_total_tokens: int) -> None:
        self.request = request
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        self.slot: int | None = None
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer, self.prompt_ids)
        room = max_total_tokens - len(self.prompt_ids)
        self._max_new_tokens = min(request.stopping.max_new_tokens, room)

    @property
    def slot_len(self) -> int:
        """How many positions of the slot are written: every token but the newest, which the next step writes."""
        return len(self.prompt_ids) + len(self.output_ids) - 1

    def append(self, token_id: int, logprob: float) -> Generation:
        """Take the next token and say what it brings to the client."""
        self.output_ids.append(token_id)
        reason = self._finish_reason()
        text = self._text.push(token_id, is_last=reason is not None)
        tokens = Tokens((token_id,), (logprob,), (text,), (token_id in self._tokenizer.special_ids,))
        end = None
        if reason is not None:
            end = GeneratedText(self._text.generated_text(), len(self.output_ids), reason)
        return Generation(self.request.id, tokens, generated_text=end)

    def _finish_reason(self) -> FinishReason | None:
        """EOS before LENGTH: only LENGTH makes the router go on with a request."""
        if not self.request.stopping.ignore_eos_token and self.output_ids[-1] in self._tokenizer.eos_ids:
            return FinishReason.EOS_TOKEN
        if len(self.output_ids) >= self._max_new_tokens:
            return FinishReason.LENGTH
        return None
