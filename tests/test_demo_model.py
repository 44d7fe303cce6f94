"""The demo model says what it is known to say, through the real commands."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.servers import ROOT, ServerProcess, ready_server, start_model_server

DEMO_MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct"
TOOL = [sys.executable, "-c", "from tpu_tgi_server.cli import tools_app; tools_app()"]
QUESTION = "What is the capital of France?"

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module", params=["cpu", "xla-cpu"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp(f"demo-{request.param}")
    sizes = ["--max-total-tokens", "256", "--max-input-tokens", "128", "--max-batch-size", "2"]
    options = ["--device", request.param, "--dtype", "float32", *sizes]
    with ready_server(start_model_server(folder, DEMO_MODEL, *options)) as server:
        yield server


def generate(server: ServerProcess, *arguments: str, stdin: str = "") -> list[str]:
    """The lines that the client prints."""
    uds_path = str(server.socket).removesuffix("-0")
    command = [*TOOL, "generate", "--uds-path", uds_path, "--max-new-tokens", "20", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, input=stdin, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_capital_of_france(server: ServerProcess) -> None:
    answer, figures = generate(server, "--chat", QUESTION)
    assert answer == "The capital of France is Paris."
    assert figures.startswith("8 tokens, first after ")


def test_lines_of_standard_input_are_answered_together(server: ServerProcess) -> None:
    lines = generate(server, stdin=f"{QUESTION}\n\n{QUESTION}\n")
    assert lines[:-1] == [
        f"[1] > {QUESTION}",
        f"[2] > {QUESTION}",
        "[1] The capital of France is Paris.",
        "[2] The capital of France is Paris.",
    ]
    assert lines[-1].startswith("16 tokens, first after ")
