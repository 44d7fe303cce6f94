"""What a decode step costs with each kind of request: real server, real client, the demo model on the CPU.

Prints a table and writes bench-results/report.json. Times vary from machine to machine; the ratios to the greedy step,
taken in the same run, are what counts.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.pb.v2 import generate_pb2_grpc

NUM_STREAMS = 8
NUM_TOKENS = 48
RESULTS = Path("bench-results")
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}
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
    """Medians over the full decode steps of one run, in milliseconds, and the ratio of `call_ms` to the greedy one.

    `call_ms` is what the client waits for; `forward_ms` the model with its sampler; `text_ms` the rest of the engine:
    text, grammar masks, bookkeeping; what is then left is gRPC and the mailbox.
    """

    kind: str
    call_ms: float
    forward_ms: float
    text_ms: float
    ratio: float = 1.0


def measure(stub: Any, number: int, kind: str) -> StepCost:
    """One batch of NUM_STREAMS requests of a kind, decoded together."""
    requests = [
        pb.Request(
            id=number * 100 + stream,
            inputs=f"Tell me about the number {stream}.",
            parameters=pb.NextTokenChooserParameters(**{**NEUTRAL, **KINDS[kind]}),
            stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=NUM_TOKENS, ignore_eos_token=True),
        )
        for stream in range(NUM_STREAMS)
    ]
    response = stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=number, requests=requests, size=NUM_STREAMS)))
    calls, forwards, texts = [], [], []
    while response.HasField("batch"):
        started = time.perf_counter()
        response = stub.Decode(pb.DecodeRequest(batches=[response.batch]))
        if len(response.generations) == NUM_STREAMS:
            calls.append((time.perf_counter() - started) * 1e3)
            forwards.append(response.forward_ns / 1e6)
            texts.append(response.decode_ns / 1e6)
    return StepCost(kind, *(statistics.median(values) for values in (calls, forwards, texts)))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        uds_path = Path(folder) / "bench"
        command = [str(Path(sys.executable).parent / "tpu-tgi-serve"), "--model-id", sys.argv[1], "--device", "cpu"]
        options = ["--uds-path", str(uds_path), "--max-batch-size", str(NUM_STREAMS), "--max-total-tokens", "256"]
        server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        try:
            with grpc.insecure_channel(f"unix:{uds_path}-0") as channel:
                grpc.channel_ready_future(channel).result(timeout=120)
                stub = generate_pb2_grpc.TextGenerationServiceStub(channel)
                measure(stub, 1, "greedy")  # the first run is slower
                costs = [measure(stub, number, kind) for number, kind in enumerate(KINDS, start=2)]
        finally:
            server.terminate()
            server.wait()
    report([StepCost(**{**asdict(cost), "ratio": cost.call_ms / costs[0].call_ms}) for cost in costs])


def report(costs: list[StepCost]) -> None:
    """Print the table and write the report."""
    print(f"decode step, {NUM_STREAMS} streams, medians over {NUM_TOKENS - 1} steps, milliseconds")
    print(f"{'':18}{'call':>8}{'model':>8}{'text':>8}{'÷ greedy':>10}")
    for cost in costs:
        print(f"{cost.kind:18}{cost.call_ms:8.1f}{cost.forward_ms:8.1f}{cost.text_ms:8.2f}{cost.ratio:10.2f}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "report.json").write_text(json.dumps([asdict(cost) for cost in costs], indent=2))


if __name__ == "__main__":
    main()
