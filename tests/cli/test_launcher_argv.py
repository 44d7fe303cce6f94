"""Every word that TGI's launcher may give to a shard, given to a real process in the launcher's environment.

Processes are started two at a time when the first test wants a result, and each test looks at one of them.
"""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launcher import (
    COMMAND,
    DOWNLOAD_ALWAYS,
    DOWNLOAD_OPTIONAL,
    SERVE_OPTIONAL,
    SERVE_REFUSED,
    Shard,
    serve_words,
    shard_environment,
)
from tests.servers import ROOT

Options = tuple[tuple[str, ...], ...]

SERVED: list[Options] = [
    (dtype, *(option for option in SERVE_OPTIONAL if option[0] != "--dtype"))
    for dtype in SERVE_OPTIONAL
    if dtype[0] == "--dtype"
]
"""All together with each dtype; a start takes seconds."""

REFUSED: list[Options] = [(option,) for option in SERVE_REFUSED]
DOWNLOADED: list[Options] = [(), *((option,) for option in DOWNLOAD_OPTIONAL), DOWNLOAD_OPTIONAL]


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its status, the texts of its log, and its standard error."""

    status: int
    texts: list[str]
    errors: str


Outcomes = dict[tuple[str, Options], "Future[Outcome]"]


def name(options: Options) -> str:
    return " ".join(word for option in options for word in option) or "nothing"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Outcomes]:
    with ThreadPoolExecutor(2) as starter:
        served = {
            ("serve", options): starter.submit(
                serve, serve_words(tiny_model_folder, folder / "uds", *options), folder / "uds"
            )
            for options in SERVED + REFUSED
            for folder in [tmp_path_factory.mktemp("serve")]
        }
        downloaded = {
            ("download", options): starter.submit(download, tiny_model_folder, options) for options in DOWNLOADED
        }
        yield {**served, **downloaded}


def serve(words: list[str], uds_path: Path) -> Outcome:
    """Start a shard, and end it as the launcher does if it becomes ready."""
    shard = Shard(words, uds_path, shard_environment(ROOT / "src", HF_HUB_OFFLINE="1"))
    try:
        is_ready = shard.waits_until_ready_or_gone()
        status = 0 if is_ready else shard.process.wait()
        records, errors = shard.stop() if is_ready else shard.read_to_the_end(status)
        return Outcome(status, [text for _, text in records], errors)
    finally:
        shard.close()


def download(model: Path, options: Options) -> Outcome:
    words = ["download-weights", str(model), *DOWNLOAD_ALWAYS, *(word for option in options for word in option)]
    done = subprocess.run(
        [COMMAND, *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=shard_environment(ROOT / "src"),
        check=False,
    )
    return Outcome(done.returncode, [json.loads(line)["text"] for line in done.stdout.splitlines()], done.stderr)


@pytest.mark.parametrize("options", SERVED, ids=name)
def test_serve_starts_with(outcomes: Outcomes, options: Options) -> None:
    outcome = outcomes["serve", options].result()
    assert (outcome.status, outcome.errors) == (0, "")
    assert any(text.startswith("serving on ") for text in outcome.texts)


@pytest.mark.parametrize("options", REFUSED, ids=name)
def test_serve_refuses_in_a_sentence(outcomes: Outcomes, options: Options) -> None:
    outcome = outcomes["serve", options].result()
    assert (outcome.status, outcome.texts) == (2, [])
    assert outcome.errors.startswith("error: ")
    assert outcome.errors.count("\n") == 1
    assert name(options) in outcome.errors


@pytest.mark.parametrize("options", DOWNLOADED, ids=name)
def test_download_weights_takes(outcomes: Outcomes, options: Options, tiny_model_folder: Path) -> None:
    outcome = outcomes["download", options].result()
    assert (outcome.status, outcome.errors) == (0, "")
    assert outcome.texts[-1] == f"{tiny_model_folder} is complete in {tiny_model_folder}"
