"""Decode steps that were started and whose tokens nobody has taken yet."""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf

from tpu_tgi_server.engine.sequence import Sequence
from tpu_tgi_server.model.interface import NextTokens, ReadTokens


class StepsInFlight:
    """Owns started steps, until each of their sequences has taken its tokens or is gone.

    The tokens of a sequence are in the row of its slot, which it keeps until it ends.
    """

    def __init__(self, sequences: SequenceOf[Sequence], read: ReadTokens) -> None:
        self._request_ids = {sequence.request.id for sequence in sequences}
        self._read = read
        self._chosen: list[NextTokens] | None = None
        self.ahead_ns = 0
        """How long this process has worked on them before the call that takes their tokens."""

    @property
    def is_taken(self) -> bool:
        """Whether nobody waits for its tokens any more."""
        return not self._request_ids

    def has_any(self, request_ids: Collection[int]) -> bool:
        """Whether tokens of one of these requests are on their way."""
        return not self._request_ids.isdisjoint(request_ids)

    def forget(self, request_id: int) -> None:
        """Nobody wants the tokens of this request."""
        self._request_ids.discard(request_id)

    def tokens(self) -> list[NextTokens]:
        """Wait for the steps; one entry a step."""
        if self._chosen is None:
            self._chosen = self._read()
        return self._chosen

    def take(self, request_id: int) -> bool:
        """Whether there are tokens of a request; true once."""
        is_here = request_id in self._request_ids
        self._request_ids.discard(request_id)
        return is_here
