"""When a request ends: the ends of text that the model or the client defines, then the length."""

from collections.abc import Collection

from tpu_tgi_server.engine.types import FinishReason


class StopSequences:
    """Owns the end of the text so far, as much of it as a stop sequence may begin in.

    A stop sequence is a literal string, and is found wherever it lies in the new text, also across and inside tokens.
    An empty one is found at once.
    """

    def __init__(self, sequences: Collection[str]) -> None:
        self._sequences = tuple(sequences)
        self._num_kept = max((len(sequence) for sequence in sequences), default=0) - 1
        self._tail = ""

    def found_with(self, piece: str) -> bool:
        """Take the next piece of text; true if a stop sequence ends in it."""
        if not self._sequences:
            return False
        text = self._tail + piece
        self._tail = text[-self._num_kept :] if self._num_kept > 0 else ""
        return any(sequence in text for sequence in self._sequences)


def finish_reason(
    is_end_of_text: bool, is_stopped: bool, num_generated: int, max_new_tokens: int
) -> FinishReason | None:
    """LENGTH comes last, because it makes TGI's router go on with the request."""
    if is_end_of_text:
        return FinishReason.EOS_TOKEN
    if is_stopped:
        return FinishReason.STOP_SEQUENCE
    if num_generated >= max_new_tokens:
        return FinishReason.LENGTH
    return None
