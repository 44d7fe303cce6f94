"""The demo model says what it is known to say, through the real commands: on one core, on several, and on replicas."""

import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.driver import Driver, new_request
from tests.servers import ROOT, ServerProcess, ready_server, start_model_server

DEMO_MODEL = ROOT / ".cache" / "SmolLM2-135M-Instruct"
TOOL = [sys.executable, "-c", "from tpu_tgi_server.cli import tools_app; tools_app()"]
QUESTION = "What is the capital of France?"
STORY = "Once upon a time"
NUM_TOKENS = 16
OPTIONS = {
    "cpu": ["--device", "cpu"],
    "xla-cpu": ["--device", "xla-cpu"],
    "3 cores": ["--device", "xla-cpu", "--parallel", "tensor"],
    "2 replicas": ["--device", "cpu", "--replicas", "2"],
}

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module", params=OPTIONS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The cores are virtual ones of the CPU; the model's 3 key/value heads divide among them, its 49152 tokens too."""
    folder = tmp_path_factory.mktemp("demo")
    sizes = ["--max-total-tokens", "256", "--max-input-tokens", "128", "--max-batch-size", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM_DEVICES", "3" if request.param == "3 cores" else "1")
        options = [*OPTIONS[request.param], "--dtype", "float32", *sizes]
        with ready_server(start_model_server(folder, DEMO_MODEL, *options)) as server:
            yield server


@cache
def greedy_ids(prompt: str) -> list[int]:
    """What `generate` of transformers goes on with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    inputs = AutoTokenizer.from_pretrained(DEMO_MODEL)(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def generate(server: ServerProcess, *arguments: str, stdin: str = "") -> list[str]:
    """The lines that the client prints."""
    uds_path = str(server.socket).removesuffix("-0")
    command = [*TOOL, "generate", "--uds-path", uds_path, "--max-new-tokens", "20", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, input=stdin, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_ids_are_those_of_generate(server: ServerProcess) -> None:
    with server.connect() as stub:
        requests = [new_request(number, prompt, new=NUM_TOKENS) for number, prompt in enumerate((QUESTION, STORY))]
        answers = Driver(stub).run(0, *requests)
    assert [answer.ids for answer in answers] == [greedy_ids(QUESTION), greedy_ids(STORY)]


@pytest.mark.parametrize("server", ["cpu", "xla-cpu"], indirect=True)
def test_capital_of_france(server: ServerProcess) -> None:
    answer, figures = generate(server, "--chat", QUESTION)
    assert answer == "The capital of France is Paris."
    assert figures.startswith("8 tokens, first after ")


@pytest.mark.parametrize("server", ["cpu"], indirect=True)
def test_lines_of_standard_input_are_answered_together(server: ServerProcess) -> None:
    lines = generate(server, stdin=f"{QUESTION}\n\n{QUESTION}\n")
    assert lines[:-1] == [
        f"[1] > {QUESTION}",
        f"[2] > {QUESTION}",
        "[1] The capital of France is Paris.",
        "[2] The capital of France is Paris.",
    ]
    assert lines[-1].startswith("16 tokens, first after ")
