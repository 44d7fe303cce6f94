"""Measure everything, print it beside its bars, and write bench-results/report.json and report.png.

    python -m bench MODEL_FOLDER [--strict] [--chunk-tokens N]

Times vary from machine to machine, so what is compared is compared within one run, taking turns, by medians. The status
is 0 whether bars are met or not, unless --strict is given.
"""

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.bars import Bar, bar_as_json, bars_table
from bench.graphs import measure_graphs
from bench.joining import measure_join
from bench.kinds import StepCost, kinds_table, measure_kinds, measure_step
from bench.loading import measure_loading
from bench.peer import transformers_peer
from bench.plot import draw
from bench.server import served_model
from bench.throughput import measure_arrivals, measure_streams

RESULTS = Path("bench-results")
DTYPE = "float32"
NUM_HOST_SLOTS = 16
NUM_HOST_TOKENS = 48


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("model", type=Path)
    parser.add_argument("--strict", action="store_true", help="status 1 if a bar is missed")
    parser.add_argument("--chunk-tokens", type=int, help="how many prompt tokens the server prefills at a time")
    arguments = parser.parse_args()
    started = time.monotonic()
    bars, costs = measure(arguments.model, arguments.chunk_tokens)
    print(f"\n{bars_table(bars)}\n\ndecode step of 8 streams, medians, milliseconds\n{kinds_table(costs)}\n")
    write_report(bars, costs, time.monotonic() - started)
    return int(arguments.strict and any(bar.is_met is False for bar in bars))


def measure(model: Path, chunk_len: int | None) -> tuple[list[Bar], list[StepCost]]:
    """One server of 8 slots and transformers take turns; then a server of 16 slots; then what needs no server."""
    bars: list[Bar] = []

    def add(*new: Bar) -> None:
        bars.extend(new)
        print(bars_table(new), flush=True)

    sizes = ("--dtype", DTYPE, "--max-total-tokens", "640")
    with served_model(model, 8, *sizes) as stub:
        with transformers_peer(model, DTYPE) as peer:
            add(measure_streams(stub, peer, model))
            add(measure_arrivals(stub, peer, model))
        add(measure_join(stub, chunk_len))
        costs = measure_kinds(stub)
    with served_model(model, NUM_HOST_SLOTS, *sizes) as stub:
        add(measure_host(stub))
    add(*measure_graphs())
    add(*measure_loading(model))
    return bars, costs


def measure_host(stub: Any) -> Bar:
    """What a client waits for beside the model's forward: gRPC, mailbox, text, Python."""
    measure_step(stub, 1, "greedy", NUM_HOST_SLOTS, 8)
    cost = measure_step(stub, 2, "greedy", NUM_HOST_SLOTS, NUM_HOST_TOKENS)
    note = f"text {cost.text_ms:.2f} ms, gRPC and mailbox {cost.host_ms - cost.text_ms:.2f} ms"
    return Bar(f"host time a step, {NUM_HOST_SLOTS} slots, p50", cost.host_ms, 1.0, "<=", "ms", note)


def write_report(bars: list[Bar], costs: list[StepCost], seconds: float) -> None:
    """The figures, where they were taken, and the picture."""
    RESULTS.mkdir(exist_ok=True)
    report = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "seconds": round(seconds),
        "bars": [bar_as_json(bar) for bar in bars],
        "kinds": [asdict(cost) for cost in costs],
    }
    (RESULTS / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(bars, costs, RESULTS / "report.png")
    print(f"{RESULTS / 'report.json'} and report.png written after {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
