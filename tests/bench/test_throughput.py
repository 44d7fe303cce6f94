"""The benchmark's stand-in for a router serves everything that arrives."""

from types import SimpleNamespace
from typing import Any

from bench.throughput import NUM_STREAMS, Work, serve
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


class CountingStub:
    """Owns how many tokens each request still wants; every token has the id 7."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.largest_step = 0

    def Prefill(self, request: Any) -> Any:  # noqa: N802
        self.left |= {one.id: one.stopping_parameters.max_new_tokens for one in request.batch.requests}
        return self._step(request.batch.id, [one.id for one in request.batch.requests])

    def Decode(self, request: Any) -> Any:  # noqa: N802
        ids = [id for batch in request.batches for id in batch.request_ids]
        self.largest_step = max(self.largest_step, len(ids))
        return self._step(request.batches[0].id, ids)

    def _step(self, batch_id: int, ids: list[int]) -> Any:
        for id in ids:
            self.left[id] -= 1
        running = [id for id in ids if self.left[id]]
        batch = pb.CachedBatch(id=batch_id, request_ids=running, size=len(running))
        generations = [pb.Generation(request_id=id, tokens=pb.Tokens(ids=[7])) for id in ids]
        return SimpleNamespace(generations=generations, batch=batch, HasField=lambda _: bool(running))


def test_every_arrival_gets_its_tokens_and_no_step_has_more_requests_than_slots() -> None:
    wanted = [1 + number % 5 for number in range(40)]
    stub = CountingStub()
    _, ids = serve(
        stub, Work(["text"] * 40, [[1]] * 40, wanted, [0.0005 * number for number in range(40)]), first_id=100
    )
    assert list(map(len, ids)) == wanted
    assert 0 < stub.largest_step <= NUM_STREAMS
