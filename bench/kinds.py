"""What a decode step costs with each kind of request, and where its time goes."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.bars import Bar
from bench.server import new_request, prefill
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

NUM_STREAMS = 8
NUM_TOKENS = 32
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "temperature": {"temperature": 0.8, "seed": 1},
    "top-k and top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 1},
    "typical-p": {"typical_p": 0.9, "seed": 1},
    "watermark": {"watermark": True},
    "grammar: regex": {"grammar": "[A-Za-z ,.]{200,}", "grammar_type": pb.GRAMMAR_TYPE_REGEX},
    "grammar: JSON": {"grammar": json.dumps(SCHEMA), "grammar_type": pb.GRAMMAR_TYPE_JSON},
}


@dataclass(frozen=True)
class StepCost:
    """Medians over the full decode steps of one batch, in milliseconds, and the ratio of `call_ms` to the greedy one.

    `call_ms` is the time from one answer to the next, for a client that asks again at once; `forward_ms` the model with
    its sampler, steps ahead of the client included; `host_ms` what is left. `text_ms` is the part of the engine in it:
    text, grammar masks, bookkeeping.
    """

    kind: str
    call_ms: float
    forward_ms: float
    text_ms: float
    host_ms: float
    ratio: float = 1.0


def measure_step(stub: Any, batch_id: int, kind: str, num_streams: int, num_tokens: int) -> StepCost:
    """One batch of requests of a kind, decoded together. `host_ms` is the median of what is not the model's forward."""
    requests = [
        new_request(batch_id * 100 + stream, f"Tell me about the number {stream}.", num_tokens, **KINDS[kind])
        for stream in range(num_streams)
    ]
    response: Any = prefill(stub, batch_id, requests)
    calls, forwards, texts = [], [], []
    answered = time.perf_counter()
    while response.HasField("batch"):
        response = stub.Decode(pb.DecodeRequest(batches=[response.batch]))
        before, answered = answered, time.perf_counter()
        if len(response.generations) == num_streams:
            calls.append((answered - before) * 1e3)
            forwards.append(response.forward_ns / 1e6)
            texts.append(response.decode_ns / 1e6)
    hosts = [call - forward for call, forward in zip(calls, forwards, strict=True)]
    return StepCost(kind, *(statistics.median(values) for values in (calls, forwards, texts, hosts)))


def measure_kinds(stub: Any) -> list[StepCost]:
    """Every kind, after one run that only warms up."""
    measure_step(stub, 1, "greedy", NUM_STREAMS, 8)
    costs = [measure_step(stub, number, kind, NUM_STREAMS, NUM_TOKENS) for number, kind in enumerate(KINDS, start=2)]
    return [replace(cost, ratio=cost.call_ms / costs[0].call_ms) for cost in costs]


def measure_host(stub: Any, num_streams: int) -> Bar:
    """What a step takes beside the model's forward, as far as no step ahead hides it: gRPC, mailbox, text, Python."""
    measure_step(stub, 1, "greedy", num_streams, 8)
    cost = measure_step(stub, 2, "greedy", num_streams, 2 * NUM_TOKENS)
    note = f"text {cost.text_ms:.2f} ms, gRPC and mailbox {cost.host_ms - cost.text_ms:.2f} ms"
    return Bar(f"host time a step, {num_streams} slots, p50", cost.host_ms, 1.0, "<=", "ms", note)


def kinds_table(costs: Sequence[StepCost]) -> str:
    """One line for each kind."""
    lines = [f"{'':16}{'call':>8}{'model':>8}{'text':>8}{'host':>8}{'÷ greedy':>10}"]
    lines += [
        f"{cost.kind:16}{cost.call_ms:8.1f}{cost.forward_ms:8.1f}{cost.text_ms:8.2f}{cost.host_ms:8.2f}{cost.ratio:10.2f}"
        for cost in costs
    ]
    return "\n".join(lines)
