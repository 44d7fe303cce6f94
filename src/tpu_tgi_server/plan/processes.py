"""The two processes behind a plan: torch_xla traces in one, libtpu compiles in the other, and neither sees a TPU.

torch_xla and jax bring a PJRT client each, and libtpu may abort the process that it is in: so each has its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from tpu_tgi_server.plan.chips import Chip
from tpu_tgi_server.plan.messages import Compiled, Module, Traced, TraceRequest

TRACE_ENVIRONMENT = {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"}
COMPILE_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
"""The second keeps libtpu from asking a cloud's metadata server which TPU this is."""

LOCKED = "libtpu multi-process lockfile"
"""In the message of a libtpu that found another one at work on this host."""
MAX_WAIT_S = 600.0
SECONDS_BETWEEN_TRIES = 2.0

NO_COMPILER = "compiling for a TPU needs libtpu and jax: pip install '.[plan]' in a clone of tpu-tgi-server"


class PlanError(Exception):
    """A plan cannot be made; the message is one for the user."""


def trace_graphs(request: TraceRequest) -> Traced:
    """Trace in a process of its own.

    Raises:
        PlanError: the model's config cannot be read, its sizes do not fit, or the process died.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tpu_tgi_server.plan.trace"],
        input=json.dumps(asdict(request)),
        env={**os.environ, **TRACE_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if not lines:
        raise PlanError(f"the tracing process ended without an answer: {last_line(done.stderr)}")
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise PlanError(answer["error"])
    return Traced.from_json(answer)


def compile_graphs(
    traced: Traced, chip: Chip, on_graph: Callable[[str, int, int], None]
) -> Mapping[str, Compiled | str]:
    """Compile every module, one after the other, in a process of its own. Waits while another process uses libtpu.

    Args:
        traced: what to compile.
        chip: what to compile for.
        on_graph: called as each graph is over, with its name, its number, and how many there are.

    Returns:
        By the graph's name what the compiler says, or why it refuses.

    Raises:
        PlanError: libtpu or jax are not installed.
    """
    check_compiler()
    results: dict[str, Compiled | str] = {}
    deadline = time.monotonic() + MAX_WAIT_S
    while len(results) < len(traced.modules):
        remaining = {name: module for name, module in traced.modules.items() if name not in results}
        for name, result in zip(remaining, compile_in_order(traced, [*remaining.values()], chip), strict=False):
            if isinstance(result, str) and LOCKED in result and time.monotonic() < deadline:
                time.sleep(SECONDS_BETWEEN_TRIES)
                break
            results[name] = result
            on_graph(name, len(results), len(traced.modules))
    return results


def compile_in_order(traced: Traced, modules: Sequence[Module], chip: Chip) -> Iterator[Compiled | str]:
    """Results in the order of the modules. If the process dies, the last result says so and the rest are missing."""
    numbers = map(str, (traced.num_cores, *traced.cache_sizes))
    command = [sys.executable, "-m", "tpu_tgi_server.plan.compile", chip.name, *numbers]
    environment = {**os.environ, **COMPILE_ENVIRONMENT}
    with tempfile.TemporaryFile("w+") as inputs, tempfile.TemporaryFile("w+") as errors:
        inputs.writelines(json.dumps(asdict(module)) + "\n" for module in modules)
        inputs.seek(0)
        with subprocess.Popen(
            command, env=environment, stdin=inputs, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            for line in process.stdout or ():
                answer = json.loads(line)
                yield answer["error"] if "error" in answer else Compiled(**answer)
        errors.seek(0)
        yield f"the compiler's process ended with status {process.returncode}: {last_line(errors.read())}"


def check_compiler() -> None:
    """See whether the optional packages are there.

    Raises:
        PlanError: they are not.
    """
    if not all(importlib.util.find_spec(name) for name in ("jax", "jaxlib", "libtpu")):
        raise PlanError(NO_COMPILER)


def last_line(text: str) -> str:
    """What a process that died said last."""
    return text.strip().rpartition("\n")[2] or "it said nothing"
