"""Compile graphs for v5e chips that are not there, and fail if they got worse: `make tpu-check`.

    python scripts/tpu_check.py [MODEL_FOLDER MAX_TOTAL_TOKENS ...]

Each folder needs a config.json only, and is compiled for one chip. MAX_TOTAL_TOKENS is more than 1024. See docs/plan.md
for the bars.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tpu_tgi_server.plan.check import findings
from tpu_tgi_server.plan.chips import CHIPS
from tpu_tgi_server.plan.messages import REFERENCE, Traced, TraceRequest
from tpu_tgi_server.plan.processes import PlanError, compile_graphs, trace_graphs

CONFIGS = Path(__file__).parent.parent / "tests/plan"
NUM_SLOTS, MAX_INPUT_TOKENS, PREFILL_CHUNK_TOKENS = 8, 1024, 128
PREFILL, CHUNK = "prefill 128 greedy", "chunk 1024 greedy"


@dataclass(frozen=True)
class Check:
    """Some graphs of one model over some cores: decode, and on one core what it is compared with, and the others."""

    folder: Path
    max_total_tokens: int = 2048
    num_cores: int = 1
    others: tuple[str, ...] = (REFERENCE, PREFILL, CHUNK)

    def __str__(self) -> str:
        return self.folder.name if self.num_cores == 1 else f"{self.folder.name} over {self.num_cores} chips"

    @property
    def graphs(self) -> tuple[str, ...]:
        return (f"decode {self.max_total_tokens} greedy", *self.others)


CHECKS = (
    Check(CONFIGS / "llama-3.2-1b", others=(REFERENCE, PREFILL)),  # Gemma's chunk has such layers too
    Check(CONFIGS / "llama-3.2-1b", num_cores=4, others=()),  # heads of 64, two to each core
    Check(CONFIGS / "llama-3.2-1b", num_cores=8, others=()),  # and one
    Check(CONFIGS / "gemma-2-2b", max_total_tokens=8192),  # twice its window
    Check(CONFIGS / "llama-3-8b", num_cores=4, others=(PREFILL,)),
    Check(CONFIGS / "llama-3-8b", num_cores=8, others=()),
)


def trace(check: Check, target: str) -> Traced:
    """The graphs of a check, in files of a folder."""
    request = TraceRequest(
        folder=str(check.folder),
        target=target,
        num_slots=NUM_SLOTS,
        num_cores=check.num_cores,
        max_input_tokens=MAX_INPUT_TOKENS,
        max_total_tokens=check.max_total_tokens,
        prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
        graphs=check.graphs,
    )
    return trace_graphs(request)


def run(check: Check, traced: Traced) -> bool:
    """Compile, and print what is found; whether all of it is good."""
    found = list(findings(traced, compile_graphs(traced, CHIPS["v5e"], lambda *_: None)))
    for finding in found:
        print(f"{'ok  ' if finding.is_good else 'FAIL'} {check}, {finding.graph}: {finding.what}", flush=True)
    return all(finding.is_good for finding in found)


def checks_of(arguments: Sequence[str]) -> Sequence[Check]:
    """What is asked for, or all of CHECKS.

    Raises:
        ValueError: the arguments are no pairs of a model's folder and a size that has all the graphs.
    """
    if len(arguments) % 2:
        raise ValueError("each MODEL_FOLDER needs its MAX_TOTAL_TOKENS")
    given = [Check(Path(folder), int(size)) for folder, size in zip(arguments[::2], arguments[1::2], strict=True)]
    for check in given:
        if not (check.folder / "config.json").is_file():
            raise ValueError(f"there is no {check.folder / 'config.json'}")
        if check.max_total_tokens <= MAX_INPUT_TOKENS:
            raise ValueError(f"MAX_TOTAL_TOKENS must be more than {MAX_INPUT_TOKENS}, not {check.max_total_tokens}")
    return given or CHECKS


def main(*arguments: str) -> int:
    try:
        return run_all(checks_of(arguments))
    except (ValueError, PlanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_all(checks: Sequence[Check]) -> int:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as target, ThreadPoolExecutor(1) as tracer:
        folders = [tempfile.mkdtemp(dir=target) for _ in checks]
        # the next graphs are traced while the last are compiled
        good = [run(check, traced) for check, traced in zip(checks, tracer.map(trace, checks, folders), strict=True)]
    print(f"{sum(good)} of {len(good)} models within the bars, {time.monotonic() - start:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
