"""Which part of which prompt is prefilled next.

Prompts begin in the order in which they came, as soon as a slot is free. Short ones share a row of the model. A long
one goes through in chunks of a row each, and other calls have their turn in between.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from tpu_tgi_server.engine.sequence import Sequence


@dataclass(frozen=True)
class Part:
    """The next `num_tokens` of a sequence's prompt."""

    sequence: Sequence
    num_tokens: int


class PrefillQueue:
    """Owns the sequences whose prompt is not wholly prefilled: those that wait for a slot, and those that have one."""

    def __init__(self, row_tokens: int) -> None:
        self._row_tokens = row_tokens
        self._waiting: deque[Sequence] = deque()
        self._begun: deque[Sequence] = deque()

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Let new sequences wait for a slot."""
        self._waiting.extend(sequences)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is here."""
        for queue in (self._waiting, self._begun):
            if sequence in queue:
                queue.remove(sequence)

    def next_row(self, request_ids: Collection[int], num_free_slots: int, max_tokens: int) -> list[Part]:
        """What is to be prefilled together now; the named requests alone count. Nothing changes until `done`.

        A slot that is due to an earlier request is left for it, named or not.
        """
        for sequence in self._begun:
            if sequence.request.id in request_ids:
                part = self._next_part(sequence)
                return [part] if part.num_tokens <= max_tokens else []
        row: list[Part] = []
        room = min(self._row_tokens, max_tokens)
        for sequence in islice(self._waiting, num_free_slots):
            if sequence.request.id in request_ids:
                part = self._next_part(sequence)
                room -= part.num_tokens
                if room < 0:
                    break
                row.append(part)
        return row

    def done(self, row: Iterable[Part]) -> None:
        """Enter that the parts of a row are prefilled."""
        for part in row:
            sequence = part.sequence
            self.remove(sequence)
            sequence.num_prefilled += part.num_tokens
            if not sequence.is_prefilled:
                self._begun.append(sequence)

    def _next_part(self, sequence: Sequence) -> Part:
        """The remainder comes first: it shares its row with others, and the chunks that follow are full."""
        num_left = len(sequence.prompt_ids) - sequence.num_prefilled
        return Part(sequence, num_left % self._row_tokens or self._row_tokens)
