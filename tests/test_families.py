"""Every family answers as transformers does: ids, log-probabilities and all logits, on every kind of runtime.

The cores are virtual ones of the CPU.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.families import (
    CHUNK_TOKENS,
    FAMILIES,
    MAX_TOTAL_TOKENS,
    NUM_NEW_TOKENS,
    PROMPT_LENS,
    RING_LEN,
    WINDOW,
    WINDOWS,
    expected,
    save_family,
)
from tests.family_replicas import collect_from_replicas
from tests.servers import ROOT

MODES = {
    "cpu": ("cpu", "auto", 1),
    "xla-cpu": ("xla-cpu", "auto", 1),
    "2 cores": ("xla-cpu", "tensor", 2),
    "4 cores": ("xla-cpu", "tensor", 4),
}
"""Device, parallel and the number of cores."""
REPLICAS = "2 replicas"


class Running(NamedTuple):
    """A process that answers with all families, and the files that it writes to."""

    process: "subprocess.Popen[bytes]"
    output: Path
    errors: Path


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        save_family(name, root / name)
    return {name: root / name for name in FAMILIES}


@pytest.fixture(scope="module")
def processes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """One for each mode, all at once: most of what they do takes one processor."""
    target = tmp_path_factory.mktemp("answers")
    with ExitStack() as stack:
        yield {mode: stack.enter_context(running(mode, [*folders.values()], target)) for mode in MODES}


@contextmanager
def running(mode: str, folders: list[Path], target: Path) -> Iterator[Running]:
    device, parallel, num_cores = MODES[mode]
    command = [sys.executable, "-m", "tests.families", device, parallel, *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "CPU_NUM_DEVICES": str(num_cores)}
    output, errors = target / f"{mode}.json", target / f"{mode}.log"
    with output.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, cwd=ROOT)
    try:
        yield Running(process, output, errors)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=[*MODES, REPLICAS])
def answers(request: pytest.FixtureRequest, folders: dict[str, Path], processes: dict[str, Running]) -> Any:
    """Of all families, from one process, or from the two of the replicas."""
    if request.param == REPLICAS:
        return {name: asdict(answers) for name, answers in collect_from_replicas([*folders.values()]).items()}
    running = processes[request.param]
    assert running.process.wait() == 0, running.errors.read_text()
    return json.loads(running.output.read_text().splitlines()[-1])


def test_prompts_are_longer_than_the_window_and_one_than_a_chunk() -> None:
    assert sum(length > WINDOW for length in PROMPT_LENS) > 1
    assert max(PROMPT_LENS) > CHUNK_TOKENS


@pytest.mark.parametrize("answers", MODES, indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_a_window_keep_a_ring_that_answers_go_round(answers: Any, family: str) -> None:
    assert RING_LEN < NUM_NEW_TOKENS < MAX_TOTAL_TOKENS
    windows = WINDOWS.get(family, [None, None])
    assert answers[family]["ring_lens"] == [MAX_TOTAL_TOKENS if window is None else RING_LEN for window in windows]


@pytest.mark.parametrize("way", ["alone", "batched", "joined"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_log_probabilities_are_those_of_generate(
    answers: Any, folders: dict[str, Path], family: str, way: str
) -> None:
    for (ids, logprobs), (expected_ids, expected_logprobs) in zip(
        answers[family][way], expected(folders[family])[0], strict=True
    ):
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.parametrize("answers", MODES, indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_logits_are_those_of_forward(answers: Any, folders: dict[str, Path], family: str) -> None:
    """After every token of every prompt, for the whole vocabulary."""
    for found, logits in zip(answers[family]["logits"], expected(folders[family])[1], strict=True):
        np.testing.assert_allclose(np.array(found), logits.numpy(), atol=1e-4 * float(logits.abs().max()), rtol=1e-4)
