"""The text of a growing list of ids, in pieces that never break a character and never lose one.

A piece is what the newest ids add to the decoding of a short window before them: tokenizers of the SentencePiece kind
give a token other text at the start of a string than inside it.
"""

from collections.abc import Sequence

from tpu_tgi_server.engine.tokenizer import Tokenizer

CONTEXT_LEN = 5
"""How many ids of the prompt are decoded in front of the first generated one (as TGI does)."""

REPLACEMENT = "\ufffd"


class TextStream:
    """Owns the position up to which the text of one request has been handed out.

    `ids[prefix:read]` is the context, `ids[read:]` is not handed out yet.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-CONTEXT_LEN:])
        self._num_context = len(self._ids)
        self._prefix = 0
        self._read = len(self._ids)

    def push(self, token_id: int) -> str:
        """The text that became certain with `token_id`. Empty while the newest bytes are only a part of a character."""
        self._ids.append(token_id)
        piece = self._rest()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return piece

    def flush(self) -> str:
        """All that was held back, for the end of a request."""
        piece = self._rest()
        self._read = len(self._ids)
        return piece

    def generated_text(self) -> str:
        """All generated ids as text, special tokens left out.

        Those of the context stay: without them a text would lose its first space after a prompt of special tokens.
        """
        context = self._ids[: self._num_context]
        visible = [id for id in self._ids[self._num_context :] if id not in self._tokenizer.special_ids]
        return self._tokenizer.decode(context + visible)[len(self._tokenizer.decode(context)) :]

    def _rest(self) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        return self._tokenizer.decode(self._ids[self._prefix :])[len(before) :]
