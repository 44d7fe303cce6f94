"""Which requests make up which batch: the names by which the router speaks of them."""

from collections.abc import Collection, Iterable, Sequence

from tpu_tgi_server.engine.types import CachedBatch, EngineError, ErrorKind


class BatchTable:
    """Owns the map from batch id to the ids of its live requests, in arrival order."""

    def __init__(self) -> None:
        self._batches: dict[int, list[int]] = {}

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._batches

    def request_ids(self, batch_id: int) -> tuple[int, ...]:
        """The live requests of a batch; none if it is unknown."""
        return tuple(self._batches.get(batch_id, ()))

    def all_request_ids(self) -> tuple[int, ...]:
        """The live requests of every batch."""
        return tuple(id for ids in self._batches.values() for id in ids)

    def add(self, batch_id: int, request_ids: Iterable[int]) -> None:
        """Enter a new batch."""
        self._batches[batch_id] = list(request_ids)

    def merge(self, batches: Sequence[CachedBatch]) -> list[int]:
        """Make the batches one, under the id of the first, with only the requests that they name.

        Returns:
            The ids that were live and are not named: their clients are gone.

        Raises:
            EngineError: no batch is given, or one is unknown (nothing changes then).
        """
        if not batches:
            raise EngineError(ErrorKind.INVALID, "batches is empty")
        for batch in batches:
            if batch.id not in self._batches:
                raise EngineError(ErrorKind.UNKNOWN_BATCH, f"batch {batch.id} is not known")
        named_in: dict[int, set[int]] = {}  # by batch, which may be there twice
        for batch in batches:
            named_in.setdefault(batch.id, set()).update(batch.request_ids)
        kept: list[int] = []
        dropped: list[int] = []
        for batch_id, named in named_in.items():
            for request_id in self._batches.pop(batch_id):
                (kept if request_id in named else dropped).append(request_id)
        self._batches[batches[0].id] = kept
        return dropped

    def keep(self, batch_id: int, request_ids: Collection[int]) -> list[int]:
        """Keep only the named requests of one batch; return the ids that were dropped from it."""
        before = self._batches.get(batch_id, [])
        dropped = [id for id in before if id not in request_ids]
        self._set(batch_id, [id for id in before if id in request_ids])
        return dropped

    def remove(self, batch_id: int) -> None:
        """Forget a batch, if it is known."""
        self._batches.pop(batch_id, None)

    def clear(self) -> None:
        """Forget all."""
        self._batches.clear()

    def _set(self, batch_id: int, request_ids: list[int]) -> None:
        if request_ids:
            self._batches[batch_id] = request_ids
        else:
            self._batches.pop(batch_id, None)
