"""Tokens per second over gRPC beside those of transformers, the two taking turns."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.bars import Bar
from bench.peer import Peer
from bench.server import generate_all, new_request, prefill
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

NUM_STREAMS = 8
NUM_TOKENS = 48
NUM_ROUNDS = 3
NUM_ARRIVALS = 32
ARRIVAL_EVERY_S = 0.1
ANSWER_LENS = ((4, 28), (16, 96))
"""The fewest and the most tokens that arrivals want: prompts dominate the one, answers the other."""
NUM_ARRIVAL_ROUNDS = 2
"""They come after one that does not count: transformers was up to 1.5 times as slow in its first."""
WORDS = ("sea", "wide", "small", "boat", "sails", "over", "an", "island", "where", "nobody", "lives", "but", "birds")


@dataclass(frozen=True)
class Work:
    """Requests that arrive over time. Texts and their ids are the same prompts, for the one side and the other."""

    texts: list[str]
    ids: list[list[int]]
    num_tokens: list[int]
    arrivals_s: list[float]


def measure_streams(stub: Any, peer: Peer, model: Path) -> Bar:
    """Eight streams decoded together against `model.generate` in a batch of eight, prompts included on both sides."""
    texts = [f"Tell me about the number {stream}." for stream in range(NUM_STREAMS)]
    prompts = encode(model, texts)
    ours, theirs = [], []
    is_equal = False
    for number in range(NUM_ROUNDS + 1):
        requests = [new_request(1000 * (number + 1) + stream, text, NUM_TOKENS) for stream, text in enumerate(texts)]
        started = time.perf_counter()
        ids = generate_all(stub, 1000 + number, requests)
        ours.append(time.perf_counter() - started)
        seconds, peer_ids = peer.generate(prompts, NUM_TOKENS)
        theirs.append(seconds)
        is_equal = list(ids.values()) == peer_ids
    num_tokens = NUM_STREAMS * NUM_TOKENS
    return ratio_bar(
        f"tokens/s, {NUM_STREAMS} streams ÷ transformers generate", 1.3, ours[1:], theirs[1:], num_tokens, is_equal
    )


def measure_arrivals(stub: Any, peer: Peer, model: Path, answer_lens: tuple[int, int]) -> Bar:
    """Requests of mixed lengths that arrive over time against transformers' continuous batching, of as many slots."""
    work = mixed_work(model, answer_lens)
    ours, theirs = [], []
    is_equal = False
    for number in range(NUM_ARRIVAL_ROUNDS + 1):
        seconds, ids = serve(stub, work, first_id=100_000 * (number + 1))
        ours.append(seconds)
        seconds, peer_ids = peer.serve(work.ids, work.num_tokens, work.arrivals_s, NUM_STREAMS)
        theirs.append(seconds)
        is_equal = ids == peer_ids
    lens = "{} to {}".format(*answer_lens)
    name = (
        f"tokens/s, {NUM_ARRIVALS} arrivals for {lens} tokens, {NUM_STREAMS} slots ÷ transformers continuous batching"
    )
    return ratio_bar(name, 3, ours[1:], theirs[1:], sum(work.num_tokens), is_equal)


def ratio_bar(
    name: str, limit: float, ours: Sequence[float], theirs: Sequence[float], num_tokens: int, is_equal: bool
) -> Bar:
    """The ratio of the medians."""
    our_s, their_s = statistics.median(ours), statistics.median(theirs)
    answers = "the same answers" if is_equal else "answers differ"
    note = f"{num_tokens / our_s:.1f} and {num_tokens / their_s:.1f} tokens/s, {answers}"
    return Bar(name, their_s / our_s, limit, ">=", note=note)


def mixed_work(model: Path, answer_lens: tuple[int, int]) -> Work:
    """Prompts of about 8 to 90 tokens, one every tenth of a second; the same in each run."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(8, 80))) for _ in range(NUM_ARRIVALS)]
    num_tokens = [chance.randint(*answer_lens) for _ in range(NUM_ARRIVALS)]
    return Work(texts, encode(model, texts), num_tokens, [ARRIVAL_EVERY_S * n for n in range(NUM_ARRIVALS)])


def encode(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of some prompts."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def serve(stub: Any, work: Work, first_id: int) -> tuple[float, list[list[int]]]:
    """What a router does: send what has arrived, then a step for everything that runs; seconds, and the new ids."""
    ids: dict[int, list[int]] = {first_id + number: [] for number in range(len(work.texts))}
    arriving = [new_request(*request) for request in zip(ids, work.texts, work.num_tokens, strict=True)]
    running: pb.CachedBatch | None = None
    started = time.perf_counter()

    def take(response: Any) -> pb.CachedBatch | None:
        for generation in response.generations:
            ids[generation.request_id] += generation.tokens.ids
        return response.batch if response.HasField("batch") else None

    while arriving or running is not None:
        now = time.perf_counter() - started
        num_running = 0 if running is None else running.size
        num_arrived = sum(arrival <= now for arrival in work.arrivals_s) - (len(work.texts) - len(arriving))
        num_joining = min(num_arrived, NUM_STREAMS - num_running)
        batches = [] if running is None else [running]
        if num_joining:
            joining, arriving = arriving[:num_joining], arriving[num_joining:]
            joined = take(prefill(stub, joining[0].id, joining))
            batches += [] if joined is None else [joined]
        if batches:
            running = take(stub.Decode(pb.DecodeRequest(batches=batches)))
        else:
            time.sleep(0.001)
    return time.perf_counter() - started, list(ids.values())
