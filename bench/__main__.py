"""Measure everything, print it beside its bars, and write bench-results/report.json and report.png.

Times vary from machine to machine, so what is compared is compared within one run, taking turns, by medians. The status
is 0 whether bars are met or not, unless --strict is given.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from bench.bars import Bar, bar_as_json, bars_table
from bench.graphs import measure_graphs
from bench.joining import measure_join
from bench.kinds import StepCost, kinds_table, measure_host, measure_kinds
from bench.loading import measure_loading
from bench.packing import measure_packing
from bench.peer import transformers_peer
from bench.plot import draw
from bench.server import served_model
from bench.throughput import ANSWER_LENS, measure_arrivals, measure_streams

RESULTS = Path("bench-results")
DTYPE = "float32"
SERVER_OPTIONS = ("--dtype", DTYPE, "--max-total-tokens", "640")


class Benchmark:
    """Owns what has been measured so far. Its parts need a machine to themselves, each for a minute or two."""

    def __init__(self, model: Path, chunk_len: int) -> None:
        self._model = model
        self._chunk_len = chunk_len
        self.costs: list[StepCost] = []
        self.parts: dict[str, Callable[[], Iterator[Bar]]] = {
            "streams": self._streams,
            "arrivals": self._arrivals,
            "steps": self._steps,
            "host": self._host,
            "packing": lambda: iter(measure_packing(model)),
            "xla": lambda: iter(measure_graphs()),
            "loading": lambda: iter(measure_loading()),
        }

    def _streams(self) -> Iterator[Bar]:
        with served_model(self._model, 8, *SERVER_OPTIONS) as stub, transformers_peer(self._model, DTYPE) as peer:
            yield measure_streams(stub, peer, self._model)

    def _arrivals(self) -> Iterator[Bar]:
        with served_model(self._model, 8, *SERVER_OPTIONS) as stub, transformers_peer(self._model, DTYPE) as peer:
            for answer_lens in ANSWER_LENS:
                yield measure_arrivals(stub, peer, self._model, answer_lens)

    def _steps(self) -> Iterator[Bar]:
        options = (*SERVER_OPTIONS, "--prefill-chunk-tokens", str(self._chunk_len))
        with served_model(self._model, 8, *options) as stub:
            yield measure_join(stub, self._chunk_len)
            self.costs = measure_kinds(stub)

    def _host(self) -> Iterator[Bar]:
        with served_model(self._model, 16, *SERVER_OPTIONS) as stub:
            yield measure_host(stub, num_streams=16)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="streams, arrivals, steps, host, packing, xla, loading"
    )
    parser.add_argument("--strict", action="store_true", help="status 1 if a bar is missed")
    parser.add_argument(
        "--chunk-tokens", type=int, default=128, help="prompt tokens that the server prefills at a time"
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    benchmark = Benchmark(arguments.model, arguments.chunk_tokens)
    bars: list[Bar] = []
    for name in arguments.only or benchmark.parts:
        for bar in benchmark.parts[name]():
            print(bars_table([bar]), flush=True)
            bars.append(bar)
    print(f"\n{bars_table(bars)}\n")
    if benchmark.costs:
        print(f"decode step of 8 streams, medians, milliseconds\n{kinds_table(benchmark.costs)}\n")
    write_report(bars, benchmark.costs, time.monotonic() - started)
    return int(arguments.strict and any(bar.is_met is False for bar in bars))


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
