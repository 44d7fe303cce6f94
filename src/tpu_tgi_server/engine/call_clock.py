"""Where the time of one Prefill or Decode goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class CallClock:
    """Owns the times of one call, in nanoseconds, from its creation on.

    Steps that were started before the call, because it was foreseen, count as its forward time and in its total.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter_ns()
        self._ahead_ns = 0
        self.concat_ns = 0
        self.forward_ns = 0

    def end_concat(self) -> None:
        """The batches are merged."""
        self.concat_ns = time.perf_counter_ns() - self._started

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Counts what happens inside as the model's work."""
        started = time.perf_counter_ns()
        yield
        self.forward_ns += time.perf_counter_ns() - started

    def add_ahead(self, ahead_ns: int) -> None:
        """Enter what the steps of this call took before it."""
        self.forward_ns += ahead_ns
        self._ahead_ns += ahead_ns

    def total_ns(self) -> int:
        """The whole time until now."""
        return time.perf_counter_ns() - self._started + self._ahead_ns
