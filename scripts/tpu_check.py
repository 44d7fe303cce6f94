"""Compile graphs for v5e chips that are not there, and fail if they got worse: `make tpu-check`.

    python scripts/tpu_check.py [MODEL_FOLDER ...]

Each folder needs a config.json only, and is compiled for one chip. See docs/plan.md for the bars.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tpu_tgi_server.plan.check import findings
from tpu_tgi_server.plan.chips import CHIPS
from tpu_tgi_server.plan.messages import REFERENCE, TraceRequest
from tpu_tgi_server.plan.processes import compile_graphs, trace_graphs

CONFIGS = Path(__file__).parent.parent / "tests/plan"
NUM_SLOTS, MAX_TOTAL_TOKENS, MAX_INPUT_TOKENS, PREFILL_CHUNK_TOKENS = 8, 2048, 1024, 128
DECODE, PREFILL, CHUNK = "decode 2048 greedy", "prefill 128 greedy", "chunk 1024 greedy"


@dataclass(frozen=True)
class Check:
    """Some graphs of one model over some cores."""

    folder: Path
    num_cores: int = 1
    graphs: tuple[str, ...] = (DECODE, REFERENCE, PREFILL, CHUNK)

    def __str__(self) -> str:
        return self.folder.name if self.num_cores == 1 else f"{self.folder.name} over {self.num_cores} chips"


CHECKS = (
    Check(CONFIGS / "llama-3.2-1b"),
    Check(CONFIGS / "gemma-2-2b"),
    Check(CONFIGS / "llama-3-8b", num_cores=4, graphs=(DECODE, PREFILL)),
    Check(CONFIGS / "llama-3-8b", num_cores=8, graphs=(DECODE,)),
)


def run(check: Check) -> bool:
    """Print what is found; whether all of it is good."""
    with tempfile.TemporaryDirectory() as target:
        request = TraceRequest(
            folder=str(check.folder),
            target=target,
            num_slots=NUM_SLOTS,
            num_cores=check.num_cores,
            max_input_tokens=MAX_INPUT_TOKENS,
            max_total_tokens=MAX_TOTAL_TOKENS,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            graphs=check.graphs,
        )
        traced = trace_graphs(request)
        results = compile_graphs(traced, CHIPS["v5e"], lambda *_: None)
    found = list(findings(traced, results))
    for finding in found:
        print(f"{'ok  ' if finding.is_good else 'FAIL'} {check}, {finding.graph}: {finding.what}", flush=True)
    return all(finding.is_good for finding in found)


def main(*folders: str) -> int:
    start = time.monotonic()
    checks = [Check(Path(folder)) for folder in folders] or CHECKS
    good = [run(check) for check in checks]
    print(f"{sum(good)} of {len(good)} models within the bars, {time.monotonic() - start:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
