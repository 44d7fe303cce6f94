"""How long running streams wait while a long prompt joins them."""

import itertools
import statistics
import time
from typing import Any

from bench.bars import Bar
from bench.server import new_request, prefill
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

NUM_RUNNING = 7
PROMPT_LEN = 512
NUM_ROUNDS = 7
"""The longest of several gaps is all it takes for a machine that pauses once to show: so the median of many rounds."""
WORD = " sea"
"""One token of the demo model, so that a prompt of n tokens is n of them."""


def measure_join(stub: Any, chunk_len: int) -> Bar:
    """The longest gap between two tokens of a running stream, beside one chunk's prefill and one step.

    Args:
        stub: a server with more than NUM_RUNNING slots.
        chunk_len: how many prompt tokens the server prefills at a time.
    """
    alone_len = min(chunk_len, PROMPT_LEN)
    rounds = [measure_round(stub, 10_000 * (number + 1), alone_len) for number in range(NUM_ROUNDS + 1)][1:]
    ratios = [gap_s / (chunk_s + step_s) for gap_s, chunk_s, step_s in rounds]
    gap_ms, chunk_ms, step_ms = (statistics.median(values) * 1e3 for values in zip(*rounds, strict=True))
    parts = f"gap {gap_ms:.0f} ms; prefill of {alone_len} tokens {chunk_ms:.0f} ms, step {step_ms:.0f} ms"
    note = f"{parts}; {min(ratios):.2f} to {max(ratios):.2f} in {NUM_ROUNDS} rounds"
    name = f"longest gap while {PROMPT_LEN} tokens join ÷ (one chunk + one step)"
    return Bar(name, statistics.median(ratios), 1.3, "<=", note=note)


def measure_round(stub: Any, first_id: int, alone_len: int) -> tuple[float, float, float]:
    """Seconds: the longest gap, a prefill of `alone_len` tokens alone, and the median step before the join."""
    started = time.perf_counter()
    prefill(stub, first_id, [new_request(first_id, WORD * alone_len, 1)])
    alone_s = time.perf_counter() - started
    running: Any = prefill(stub, first_id + 1, [new_request(first_id + n, WORD * 8, 40) for n in range(NUM_RUNNING)])
    times = [time.perf_counter()]
    for _ in range(6):
        running = stub.Decode(pb.DecodeRequest(batches=[running.batch]))
        times.append(time.perf_counter())
    steps = [after - before for before, after in itertools.pairwise(times)]
    joiner = first_id + NUM_RUNNING
    joined: Any = prefill(stub, joiner, [new_request(joiner, WORD * PROMPT_LEN, 4)])
    batches = [running.batch, joined.batch]
    gaps = []
    has_started = bool(joined.generations)
    while True:
        running = stub.Decode(pb.DecodeRequest(batches=batches))
        gaps.append(time.perf_counter() - times[-1])
        times.append(time.perf_counter())
        if has_started:
            break
        has_started = any(generation.request_id == joiner for generation in running.generations)
        batches = [running.batch]
    stub.ClearCache(pb.ClearCacheRequest())
    return max(gaps), alone_s, statistics.median(steps)
