"""A stand-in for TGI's routers, v2 and v3: start sequence, queue, batching loop, health, and clients that hang up.

It follows their arithmetic and order of calls, and fails on everything that makes the real ones panic or exit.
"""

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import grpc

from tests.driver import Answer, check_cached_batch, take_generation

LIVENESS_ID = 2**64 - 1
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class RouterLimits:
    """The router's own flags; None where it has no default."""

    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int = 4096
    max_batch_size: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20


@dataclass
class Entry:
    """A request with the client that waits for it, which hangs up after `patience` tokens."""

    request: Any
    input_len: int
    patience: int | None = None
    answer: Answer = field(default_factory=Answer)
    error: str | None = None

    @property
    def is_abandoned(self) -> bool:
        return self.patience is not None and len(self.answer.ids) >= self.patience

    @property
    def max_new_tokens(self) -> int:
        value: int = self.request.stopping_parameters.max_new_tokens
        return value


class Router:
    """Owns the queue, the entries that wait for tokens, and the counters of ids, from 0 as the real ones count.

    Args:
        stub: the shard's gRPC stub.
        pb: the generated module of its version.
        limits: the router's flags.
    """

    def __init__(self, stub: Any, pb: ModuleType, limits: RouterLimits) -> None:
        self._stub = stub
        self._pb: Any = pb
        self._is_v3 = "v3" in pb.__name__
        self._limits = limits
        self._budget = 0
        self._queue: deque[Entry] = deque()
        self._entries: dict[int, Entry] = {}
        self._next_request_id = 0
        self._next_batch_id = 0
        self.num_filter_calls = 0
        self.on_step: Callable[[], None] = lambda: None

    def start(self) -> None:
        """ServiceDiscovery, ClearCache, Info and Warmup; then the checks that make a router exit."""
        urls = self._stub.ServiceDiscovery(self._pb.ServiceDiscoveryRequest()).urls
        assert urls
        assert all(url.startswith("unix:///") or url.startswith("/") for url in urls)
        self._stub.ClearCache(self._pb.ClearCacheRequest())
        info = self._stub.Info(self._pb.InfoRequest())
        assert info.requires_padding
        assert info.speculate == 0
        if self._is_v3:
            assert info.block_size > 0, "the queue divides by it"
            assert not info.support_chunking
        self._warm_up()

    def _warm_up(self) -> None:
        limits = self._limits
        max_input = limits.max_input_tokens or (None if self._is_v3 else 1024)
        max_total = limits.max_total_tokens or (None if self._is_v3 else 2048)
        request = self._pb.WarmupRequest(
            batch=self._warm_up_batch(max_input, max_total), max_prefill_tokens=limits.max_batch_prefill_tokens
        )
        if max_total is not None:
            request.max_total_tokens = max_total
        if max_input is not None:
            setattr(request, "max_input_tokens" if self._is_v3 else "max_input_length", max_input)
        response = self._stub.Warmup(request)
        assert response.HasField("max_supported_total_tokens")
        self._budget = response.max_supported_total_tokens
        if self._is_v3:
            assert max_input is None or response.max_input_tokens == max_input
            assert max_total is None or response.max_total_tokens == max_total
            max_input, max_total = response.max_input_tokens, response.max_total_tokens
            assert limits.max_batch_prefill_tokens <= self._budget
            assert max_input <= limits.max_batch_prefill_tokens
        assert max_input is not None
        assert max_total is not None
        assert 0 < max_input < max_total <= self._budget

    def _warm_up_batch(self, max_input: int | None, max_total: int | None) -> Any:
        """Every id is 0, and everything that can be asked for is."""
        truncate = min(max_input or self._limits.max_batch_prefill_tokens, self._limits.max_batch_prefill_tokens)
        count = -(-self._limits.max_batch_prefill_tokens // truncate)
        count = min(count, self._limits.max_batch_size or count)
        image = "![](data:image/jpeg;base64,iVBORw0KGgo=)"
        requests = []
        for number in range(count):
            text = "_test " * truncate + (image if number == 0 else "")
            request = self._pb.Request(
                id=0,
                inputs=text,
                truncate=truncate,
                prefill_logprobs=True,
                top_n_tokens=20,
                parameters=self._pb.NextTokenChooserParameters(
                    temperature=0.9,
                    top_k=10,
                    top_p=0.9,
                    typical_p=0.9,
                    repetition_penalty=1.2,
                    frequency_penalty=0.1,
                    watermark=True,
                ),
                stopping_parameters=self._pb.StoppingCriteriaParameters(
                    max_new_tokens=((max_total or truncate + 1) - truncate) % 2**32, ignore_eos_token=True
                ),
            )
            if self._is_v3:
                request.add_special_tokens = True
                request.input_chunks.chunks.add(text="_test " * truncate)
                if number == 0:
                    request.input_chunks.chunks.add(image=self._pb.Image(data=b"\x89PNG", mimetype="image/jpeg;base64"))
            requests.append(request)
        return self._pb.Batch(id=0, requests=requests, size=count, max_tokens=0)

    def check_health(self, with_prefill: bool = False) -> None:
        """What /health does while all is well, and what it does once something has failed."""
        if not with_prefill:
            self._stub.Health(self._pb.HealthRequest())
            return
        request = self._pb.Request(
            id=LIVENESS_ID,
            inputs="liveness",
            truncate=1 if self._is_v3 else 10,
            parameters=self._pb.NextTokenChooserParameters(**NEUTRAL),
            stopping_parameters=self._pb.StoppingCriteriaParameters(max_new_tokens=1),
        )
        if self._is_v3:
            request.input_chunks.chunks.add(text="liveness")
            request.blocks.append(0)
            request.slots.append(0)
        batch = self._pb.Batch(id=LIVENESS_ID, requests=[request], size=1, max_tokens=2)
        response = self._stub.Prefill(self._pb.PrefillRequest(batch=batch))
        assert not response.HasField("batch"), "the probe would stay in the shard"

    def submit(self, inputs: str, input_len: int, patience: int | None = None, **fields: Any) -> Entry:
        """A validated request of a client, into the queue."""
        new, parameters = fields.pop("new"), fields.pop("parameters", {})
        request = self._pb.Request(
            id=self._next_request_id,
            inputs=inputs,
            truncate=fields.pop("truncate", 10_000),
            parameters=self._pb.NextTokenChooserParameters(**{**NEUTRAL, **parameters}),
            stopping_parameters=self._pb.StoppingCriteriaParameters(max_new_tokens=new, ignore_eos_token=True),
            **fields,
        )
        if self._is_v3:
            request.add_special_tokens = True
            request.input_chunks.chunks.add(text=inputs)
        self._next_request_id += 1
        entry = Entry(request, input_len, patience)
        self._queue.append(entry)
        return entry

    @property
    def num_in_flight(self) -> int:
        """Requests that wait in the queue or for tokens."""
        return len(self._queue) + len(self._entries)

    def run(self) -> None:
        """The batching loop, until queue and entries are empty. `on_step` may submit more before each step."""
        self.on_step()
        while self._queue:
            cached = self._prefill(self._next_batch(None, self._budget))
            waiting = 1
            while cached is not None:
                self.on_step()
                new = self._next_batch(cached, self._budget - cached.max_tokens, waiting)
                waiting += 1
                batches = [cached]
                if new is not None:
                    joined = self._prefill(new)
                    batches += [joined] if joined is not None else []
                    waiting = 1
                cached = self._decode(batches)
            assert not self._entries, "the loop has ended with requests that still wait: incomplete generations"

    def _next_batch(self, cached: Any, token_budget: int, waiting: int = 0) -> Any:
        """Padded arithmetic, first in first out; the first that does not fit stops the scan."""
        limits = self._limits
        room = None if limits.max_batch_size is None else limits.max_batch_size - (cached.size if cached else 0)
        if room == 0 or token_budget <= 0:
            return None
        taken: list[Entry] = []
        longest = num_new = 0
        while self._queue and (room is None or len(taken) < room):
            entry = self._queue[0]
            longest = max(longest, entry.input_len)
            num_new += entry.max_new_tokens
            prefill = (len(taken) + 1) * longest
            if prefill > limits.max_batch_prefill_tokens or prefill + num_new > token_budget:
                break
            taken.append(self._queue.popleft())
        is_patient = cached is not None and waiting < limits.max_waiting_tokens
        if is_patient and len(taken) < int(cached.size * limits.waiting_served_ratio):
            self._queue.extendleft(reversed(taken))
            return None
        if not taken:
            assert cached is not None, "a request that never fits blocks the queue for good"
            return None
        self._entries.update((entry.request.id, entry) for entry in taken)
        batch = self._pb.Batch(
            id=self._next_batch_id,
            requests=[entry.request for entry in taken],
            size=len(taken),
            max_tokens=len(taken) * longest + num_new,
        )
        self._next_batch_id += 1
        return batch

    def _prefill(self, batch: Any) -> Any:
        ids = [request.id for request in batch.requests]
        try:
            response = self._stub.Prefill(self._pb.PrefillRequest(batch=batch))
        except grpc.RpcError as error:
            self._clear_quietly(batch.id)
            self._fail(ids, error)
            return None
        return self._take(response, batch.id, ids)

    def _decode(self, batches: list[Any]) -> Any:
        ids = [id for batch in batches for id in batch.request_ids]
        try:
            response = self._stub.Decode(self._pb.DecodeRequest(batches=batches))
        except grpc.RpcError as error:
            for batch in batches:
                self._clear_quietly(batch.id)
            self._fail(list(self._entries), error)
            return None
        return self._take(response, batches[0].id, ids)

    def _take(self, response: Any, batch_id: int, asked: list[int]) -> Any:
        ended = set()
        for generation in response.generations:
            assert generation.request_id in self._entries, "a generation for an id that the router does not hold"
            entry = self._entries[generation.request_id]
            take_generation(entry.answer, generation)
            if entry.answer.end is not None:
                assert entry.answer.end.finish_reason != 0 or len(entry.answer.ids) == entry.max_new_tokens, (
                    "LENGTH before the length: the router would schedule the request again"
                )
            if entry.answer.end is not None or entry.is_abandoned:
                ended.add(generation.request_id)
                del self._entries[generation.request_id]
        if not response.HasField("batch"):
            for id in asked:
                assert id not in self._entries, "no batch came back, but a request has not ended"
            return None
        check_cached_batch(response.batch, batch_id, asked)
        return self._filter(response.batch)

    def _filter(self, batch: Any) -> Any:
        live = [id for id in batch.request_ids if id in self._entries]
        abandoned = len(batch.request_ids) - len(live)
        if batch.size == len(live):
            return batch
        assert abandoned > 0
        if not live:
            self._stub.ClearCache(self._pb.ClearCacheRequest(id=batch.id))
            return None
        self.num_filter_calls += 1
        request = self._pb.FilterBatchRequest(batch_id=batch.id, request_ids=live)
        filtered = self._stub.FilterBatch(request)
        assert filtered.HasField("batch"), "the loop would end, and live requests with it"
        check_cached_batch(filtered.batch, batch.id, live)
        return filtered.batch

    def _clear_quietly(self, batch_id: int) -> None:
        with suppress(grpc.RpcError):
            self._stub.ClearCache(self._pb.ClearCacheRequest(id=batch_id))

    def _fail(self, ids: list[int], error: Any) -> None:
        for id in ids:
            entry = self._entries.pop(id, None)
            if entry is not None:
                entry.error = error.details()


def random_patience(chance: random.Random, max_new_tokens: int) -> int | None:
    """A quarter of the clients hang up before the end."""
    return chance.randrange(1, max_new_tokens + 1) if chance.random() < 0.25 else None
