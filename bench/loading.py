"""The memory that loading takes, as `scripts/bench_loading.py` measures it where it exists."""

import json
import subprocess
import sys
from pathlib import Path

from bench.bars import Bar

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_loading.py"
NAME = "peak host memory while loading ÷ what is needed"
LIMIT = 1.15


def measure_loading(model: Path) -> list[Bar]:
    """The script prints a JSON object last, with the figure as `peak_ratio`."""
    if not SCRIPT.exists():
        return [Bar(NAME, None, LIMIT, "<=", note="scripts/bench_loading.py is not there")]
    done = subprocess.run([sys.executable, str(SCRIPT), str(model)], stdout=subprocess.PIPE, text=True, check=True)
    return [Bar(NAME, json.loads(done.stdout.splitlines()[-1])["peak_ratio"], LIMIT, "<=")]
