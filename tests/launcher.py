"""What TGI's launcher does to a process of the shard: its words, its environment, and how it reads the logs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.servers import wait_for

COMMAND = Path(sys.executable).with_name("text-generation-server")
"""The launcher finds it on the PATH."""

CLOSE_STDIN = ("/bin/sh", "-c", 'exec "$@" <&-', "sh")
START_TIMEOUT_S = 120.0
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

SERVE_ORDER = (
    *("--trust-remote-code", "--sharded", "--quantize", "--speculate", "--dtype", "--kv-cache-dtype", "--revision"),
    *("--otlp-endpoint", "--otlp-service-name", "--max-input-tokens"),
)
"""In which the launcher gives what comes after --json-output."""

DOWNLOAD_ALWAYS = ("--extension", ".safetensors", "--logger-level", "INFO", "--json-output")
"""After the model."""

DOWNLOAD_OPTIONAL = (("--merge-lora",), ("--revision", "main"), ("--trust-remote-code",))

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


def serve_words(model: Path, uds_path: Path, *options: tuple[str, ...]) -> list[str]:
    """The words of `serve`, in the launcher's order."""
    given = [*options, SERVE_ALWAYS[-2:]]
    given.sort(key=lambda option: SERVE_ORDER.index(option[0]))
    return ["serve", str(model), "--uds-path", str(uds_path), *SERVE_ALWAYS[:-2], *(word for o in given for word in o)]


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


class Shard:
    """Owns a running `text-generation-server serve`; its log is read all the while, as the launcher does."""

    def __init__(self, words: Sequence[str], uds_path: Path, environment: dict[str, str]) -> None:
        self.socket = Path(f"{uds_path}-0")
        self.process = subprocess.Popen(
            [*CLOSE_STDIN, str(COMMAND), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        reader = ThreadPoolExecutor(1)
        self._records = reader.submit(lambda: list(read_as_launcher(output)))
        reader.shutdown(wait=False)

    def waits_until_ready_or_gone(self) -> bool:
        """Wait as the launcher does; whether it is ready."""
        wait_for(lambda: self.socket.exists() or self.process.poll() is not None, START_TIMEOUT_S, "the socket")
        return self.process.poll() is None

    def wait_until_ready(self) -> None:
        assert self.waits_until_ready_or_gone(), self.read_to_the_end(self.process.returncode)

    def stop(self) -> tuple[list[tuple[str, str]], str]:
        """End it as the launcher does; the records of its log, and its stderr."""
        self.process.send_signal(signal.SIGTERM)
        return self.read_to_the_end(0)

    def read_to_the_end(self, status: int) -> tuple[list[tuple[str, str]], str]:
        records = self._records.result(START_TIMEOUT_S)
        assert self.process.wait(30) == status
        assert self.process.stderr is not None
        return records, self.process.stderr.read().decode()

    def close(self) -> None:
        """End whatever is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._records.exception()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
