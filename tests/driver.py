"""A strict stand-in for the router's batching loop: it fails on everything that would make the real one panic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.service.v2 import CONVERTER


class Stub(Protocol):
    """The RPCs that the batching loop uses; gRPC's own stub has them too."""

    def Prefill(self, request: pb.PrefillRequest, /) -> pb.PrefillResponse: ...  # noqa: N802

    def Decode(self, request: pb.DecodeRequest, /) -> pb.DecodeResponse: ...  # noqa: N802

    def FilterBatch(self, request: pb.FilterBatchRequest, /) -> pb.FilterBatchResponse: ...  # noqa: N802

    def ClearCache(self, request: pb.ClearCacheRequest, /) -> pb.ClearCacheResponse: ...  # noqa: N802


class GeneratorStub:
    """Owns nothing: the RPCs, straight on a generator of this process, which may step ahead after each."""

    def __init__(self, generator: Generator, steps_ahead: bool = False) -> None:
        self._generator = generator
        self._steps_ahead = steps_ahead

    def Prefill(self, request: pb.PrefillRequest, /) -> Any:  # noqa: N802
        result = self._generator.prefill(CONVERTER.batch(request.batch))
        self._step_ahead()
        return CONVERTER.prefill_response(result)

    def Decode(self, request: pb.DecodeRequest, /) -> Any:  # noqa: N802
        batches = tuple(map(CONVERTER.cached_batch, request.batches))
        result = self._generator.decode(batches)
        self._step_ahead()
        return CONVERTER.decode_response(result)

    def FilterBatch(self, request: pb.FilterBatchRequest, /) -> pb.FilterBatchResponse:  # noqa: N802
        batch = self._generator.filter(request.batch_id, tuple(request.request_ids))
        self._step_ahead()
        return pb.FilterBatchResponse(batch=CONVERTER.cached_batch_message(batch))

    def ClearCache(self, request: pb.ClearCacheRequest, /) -> pb.ClearCacheResponse:  # noqa: N802
        self._generator.clear(request.id if request.HasField("id") else None)
        self._step_ahead()
        return pb.ClearCacheResponse()

    def _step_ahead(self) -> None:
        if self._steps_ahead:
            self._generator.step_ahead()


@dataclass
class Answer:
    """All that one request has brought so far; `end` is set when it is over."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_special: list[bool] = field(default_factory=list)
    top_tokens: list[pb.Tokens] = field(default_factory=list)
    prefill_tokens: pb.Tokens | None = None
    end: pb.GeneratedText | None = None


NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
"""The parameters that a router sends when a client has asked for nothing."""


def new_request(
    request_id: int,
    inputs: str,
    new: int = 8,
    ignore_eos: bool = True,
    stop: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    **fields: Any,
) -> pb.Request:
    """A request with neutral parameters but for those that are given."""
    return pb.Request(
        id=request_id,
        inputs=inputs,
        parameters=pb.NextTokenChooserParameters(**{**NEUTRAL, **(parameters or {})}),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=new, ignore_eos_token=ignore_eos, stop_sequences=stop
        ),
        **fields,
    )


class Driver:
    """Owns what a router keeps of its requests: who belongs to which batch, and what came back."""

    def __init__(self, stub: Stub | Any) -> None:
        self._stub = stub
        self.answers: dict[int, Answer] = {}

    def prefill(self, batch_id: int, *requests: pb.Request) -> pb.CachedBatch | None:
        """Send a new batch."""
        for request in requests:
            assert request.id not in self.answers, "the test uses a request id twice"
        batch = pb.Batch(id=batch_id, requests=requests, size=len(requests))
        response = self._stub.Prefill(pb.PrefillRequest(batch=batch))
        ids = [request.id for request in requests]
        self.answers.update((id, Answer()) for id in ids)
        return self._take(response, batch_id, ids)

    def decode(self, *batches: pb.CachedBatch) -> pb.CachedBatch | None:
        """One step for some batches, which become one."""
        response = self._stub.Decode(pb.DecodeRequest(batches=batches))
        return self._take(response, batches[0].id, [id for batch in batches for id in batch.request_ids])

    def filter(self, batch: pb.CachedBatch, request_ids: Sequence[int]) -> pb.CachedBatch | None:
        """Keep some requests of a batch, as the router does when clients hang up."""
        response = self._stub.FilterBatch(pb.FilterBatchRequest(batch_id=batch.id, request_ids=request_ids))
        if not response.HasField("batch"):
            return None
        check_cached_batch(response.batch, batch.id, request_ids)
        return response.batch

    def clear(self, batch: pb.CachedBatch | None = None) -> None:
        """Drop one batch, or all."""
        self._stub.ClearCache(pb.ClearCacheRequest(id=batch.id if batch else None))

    def drain(self, batch: pb.CachedBatch | None) -> None:
        """Decode until no batch comes back."""
        while batch is not None:
            batch = self.decode(batch)

    def run(self, batch_id: int, *requests: pb.Request) -> list[Answer]:
        """Prefill, then decode to the end."""
        self.drain(self.prefill(batch_id, *requests))
        return [self.answers[request.id] for request in requests]

    def _take(
        self, response: pb.PrefillResponse | pb.DecodeResponse, batch_id: int, asked: Sequence[int]
    ) -> pb.CachedBatch | None:
        seen: set[int] = set()
        for generation in response.generations:
            assert generation.request_id in asked, f"a generation for {generation.request_id}, which was not asked"
            assert generation.request_id not in seen, f"two generations for {generation.request_id}"
            seen.add(generation.request_id)
            take_generation(self.answers[generation.request_id], generation)
        batch = response.batch if response.HasField("batch") else None
        live = [id for id in asked if self.answers[id].end is None]
        if batch is None:
            assert not live, f"no batch came back, but {live} have not ended"
            return None
        check_cached_batch(batch, batch_id, live)
        assert sorted(batch.request_ids) == sorted(live), "the batch is not what is left of the requests"
        return batch


def take_generation(answer: Answer, generation: pb.Generation) -> None:
    """Append a generation to the answer of its request, if it keeps the protocol."""
    assert answer.end is None, f"a generation for {generation.request_id} after its end"
    assert generation.HasField("tokens"), "a generation without tokens"
    tokens = generation.tokens
    assert len(tokens.ids) == len(tokens.logprobs) == len(tokens.texts) == len(tokens.is_special) > 0
    answer.ids += tokens.ids
    answer.logprobs += tokens.logprobs
    answer.texts += tokens.texts
    answer.is_special += tokens.is_special
    answer.top_tokens += generation.top_tokens
    if generation.HasField("prefill_tokens"):
        assert len(answer.ids) == len(tokens.ids), "prompt details after the first token"
        answer.prefill_tokens = generation.prefill_tokens
    if generation.HasField("generated_text"):
        answer.end = generation.generated_text
        assert answer.end.generated_tokens == len(answer.ids) > 0


def batch_of(batch: pb.CachedBatch | None) -> pb.CachedBatch:
    assert batch is not None
    return batch


def check_cached_batch(batch: pb.CachedBatch, batch_id: int, allowed_ids: Iterable[int]) -> None:
    """Fail unless the batch is one that a router can go on with."""
    assert batch.id == batch_id
    assert batch.size == len(batch.request_ids) > 0
    assert len(set(batch.request_ids)) == batch.size, "a request is twice in its batch"
    assert set(batch.request_ids) <= set(allowed_ids), "the batch has requests that nobody asked for"
