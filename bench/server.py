"""A server in processes of its own, and the requests that the benchmark sends it."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.pb.v2 import generate_pb2_grpc

START_TIMEOUT_S = 180
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0}


@contextmanager
def served_model(model: Path, num_slots: int, *options: str) -> Iterator[Any]:
    """A stub of generate.v2 on a server of the model on plain torch, ready for requests."""
    with tempfile.TemporaryDirectory() as folder:
        uds_path = Path(folder) / "bench"
        command = [sys.executable, "-m", "tpu_tgi_server.cli", "--model-id", str(model), "--device", "cpu"]
        sizes = ["--uds-path", str(uds_path), "--max-batch-size", str(num_slots)]
        server = subprocess.Popen([*command, *sizes, *options], stdout=subprocess.DEVNULL)
        try:
            with grpc.insecure_channel(f"unix:{uds_path}-0") as channel:
                grpc.channel_ready_future(channel).result(timeout=START_TIMEOUT_S)
                yield generate_pb2_grpc.TextGenerationServiceStub(channel)
        finally:
            server.terminate()
            server.wait()


def new_request(request_id: int, inputs: str, num_tokens: int, **parameters: Any) -> pb.Request:
    """A request that goes on for `num_tokens`, greedy unless parameters say otherwise."""
    return pb.Request(
        id=request_id,
        inputs=inputs,
        parameters=pb.NextTokenChooserParameters(**{**NEUTRAL, **parameters}),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=num_tokens, ignore_eos_token=True),
    )


def prefill(stub: Any, batch_id: int, requests: list[pb.Request]) -> pb.PrefillResponse:
    """Send a batch."""
    batch = pb.Batch(id=batch_id, requests=requests, size=len(requests))
    response: pb.PrefillResponse = stub.Prefill(pb.PrefillRequest(batch=batch))
    return response


def generate_all(stub: Any, batch_id: int, requests: list[pb.Request]) -> dict[int, list[int]]:
    """Decode a batch to its end: the ids of each request."""
    ids: dict[int, list[int]] = {request.id: [] for request in requests}
    response: Any = prefill(stub, batch_id, requests)
    while True:
        for generation in response.generations:
            ids[generation.request_id] += generation.tokens.ids
        if not response.HasField("batch"):
            return ids
        response = stub.Decode(pb.DecodeRequest(batches=[response.batch]))
