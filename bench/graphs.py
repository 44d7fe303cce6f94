"""What XLA itself counts, as bars. The counting is done by `bench.xla_counts`, in a process of its own."""

import json
import subprocess
import sys

from bench.bars import Bar


def measure_graphs() -> list[Bar]:
    """With a tiny random model on `xla-cpu`."""
    command = [sys.executable, "-m", "bench.xla_counts"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"bench.xla_counts failed:\n{done.stderr}")
    counts = json.loads(done.stdout.splitlines()[-1])
    return [Bar(f"xla-cpu: {name}", value, limit, relation) for name, (value, relation, limit) in counts.items()]
