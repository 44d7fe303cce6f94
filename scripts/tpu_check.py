"""Compile decode and prefill graphs for a v5e chip that is not there, and fail if they got worse: `make tpu-check`.

    python scripts/tpu_check.py [MODEL_FOLDER MAX_TOTAL_TOKENS ...]

Each folder needs a config.json only. See docs/plan.md for the bars.
"""

import sys
import tempfile
import time
from pathlib import Path

from tpu_tgi_server.plan.check import findings
from tpu_tgi_server.plan.chips import CHIPS
from tpu_tgi_server.plan.messages import REFERENCE, TraceRequest
from tpu_tgi_server.plan.processes import compile_graphs, trace_graphs

CONFIGS = Path(__file__).parent.parent / "tests/plan"
MODELS = (("llama-3.2-1b", 2048), ("gemma-2-2b", 8192))
"""Folders, and the length of a slot: Gemma's is more than its window of 4096."""
NUM_SLOTS, MAX_INPUT_TOKENS = 8, 128


def check(folder: Path, max_total_tokens: int) -> bool:
    """Print what is found about one model; whether all of it is good."""
    with tempfile.TemporaryDirectory() as target:
        request = TraceRequest(
            folder=str(folder),
            target=target,
            num_slots=NUM_SLOTS,
            max_input_tokens=MAX_INPUT_TOKENS,
            max_total_tokens=max_total_tokens,
            graphs=(f"decode {max_total_tokens} greedy", REFERENCE, "prefill 128 greedy"),
        )
        traced = trace_graphs(request)
        results = compile_graphs(traced, CHIPS["v5e"], lambda *_: None)
    found = list(findings(traced, results))
    for finding in found:
        print(f"{'ok  ' if finding.is_good else 'FAIL'} {folder.name}, {finding.graph}: {finding.what}", flush=True)
    return all(finding.is_good for finding in found)


def main(*arguments: str) -> int:
    start = time.monotonic()
    given = [(Path(folder), int(size)) for folder, size in zip(arguments[::2], arguments[1::2], strict=True)]
    good = [check(folder, size) for folder, size in given or [(CONFIGS / name, size) for name, size in MODELS]]
    print(f"{sum(good)} of {len(good)} models within the bars, {time.monotonic() - start:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
