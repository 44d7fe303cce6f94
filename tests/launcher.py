"""What TGI's launcher does to a process of the shard: its words, its environment, and how it reads the logs."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CHUNK_BYTES = 32 * 1024
LEVELS = {"TRACE", "DEBUG", "INFO", "SUCCESS", "WARNING", "ERROR", "CRITICAL"}

SERVE_ALWAYS = ("--logger-level", "INFO", "--json-output", "--otlp-service-name", "text-generation-inference.router")
"""After the model and --uds-path."""

SERVE_OPTIONAL = (
    ("--trust-remote-code",),
    ("--dtype", "float16"),
    ("--dtype", "bfloat16"),
    ("--revision", "main"),
    ("--otlp-endpoint", "http://127.0.0.1:4317"),
    ("--max-input-tokens", "64"),
    ("--speculate", "0"),
)
"""What the launcher adds if its user asks for it, and the shard obeys or may ignore."""

SERVE_REFUSED = (
    ("--sharded",),
    *(
        ("--quantize", name)
        for name in (
            *("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "fp8"),
            *("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4"),
        )
    ),
    ("--speculate", "2"),
    ("--kv-cache-dtype", "fp8_e4m3fn"),
    ("--kv-cache-dtype", "fp8_e5m2"),
)
"""What it adds too, and would change how the model runs."""


def shard_environment(python_path: Path, **given: str) -> dict[str, str]:
    """The environment of a shard, made anew by the launcher; `given` is what its user's options add."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(python_path),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "CUDA_MEMORY_FRACTION": "1",
        "SAFETENSORS_FAST_GPU": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_ENABLE_HF_TRANSFER": "1",
        "CUDA_GRAPHS": "1,2,4,8,16,32",
        "PREFIX_CACHING": "true",
        "ATTENTION": "flashinfer",
        **given,
    }


def read_as_launcher(descriptor: int) -> Iterator[tuple[str, str]]:
    """Level and text of each record until the end of a pipe; a piece of a read that is no record is an error here.

    The launcher drops such pieces without a word, and so every record that two reads share.
    """
    while chunk := os.read(descriptor, CHUNK_BYTES):
        yield from parse_pieces(chunk.split(b"\n"))


def parse_pieces(pieces: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    for piece in filter(None, pieces):
        record = json.loads(piece.decode())
        level = record["record"]["level"]["name"]
        assert level in LEVELS
        assert isinstance(record["text"], str)
        yield level, record["text"]
