"""The two commands as a person at a terminal meets them."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.scripted import Faults
from tests.servers import ROOT, ready_server, start_model_server, start_scripted_server
from tpu_tgi_server.config import Settings
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

SERVE = "from tpu_tgi_server.cli import serve_app; serve_app()"
TOOLS = "from tpu_tgi_server.cli import tools_app; tools_app()"


def run(command: str, *arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-c", command, *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        env=environment,
        check=False,
    )


def test_help_lists_every_setting_with_its_default() -> None:
    text = run(SERVE, "--help").stdout
    shown = [field for field in fields(Settings) if field.name != "hf_token"]  # only the environment gives a secret
    for field in shown:
        flag = "--" + field.name.removesuffix("_s").replace("_", "-")
        assert re.search(rf"{flag}\b", text), flag
    assert text.count("default") + text.count("Default") >= len(shown) - 2  # --model-id and --json-output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--max-batch-size", "0"], "--max-batch-size must be at least 1"),
        (["--logger-level", "LOUD"], "--logger-level must be TRACE"),
        (["--device", "gpu"], "gpu"),
        (["--uds-path", "/" + "x" * 200], "--uds-path is too long"),
    ],
)
def test_bad_option_is_a_usage_error(arguments: list[str], complaint: str) -> None:
    done = run(SERVE, "--model-id", "m", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def broken_model(folder: Path, tiny_model: Path, kind: str) -> Path:
    """A model folder that cannot be loaded."""
    target = folder / kind
    if kind != "missing folder":
        target.mkdir()
    if kind in ("no weights", "no tokenizer"):
        names = [path for path in tiny_model.iterdir() if not path.name.startswith("tokenizer")]
        for path in names if kind == "no tokenizer" else tiny_model.iterdir():
            if kind == "no tokenizer" or path.suffix != ".safetensors":
                (target / path.name).symlink_to(path)
    return target


@pytest.mark.parametrize("kind", ["missing folder", "empty folder", "no weights", "no tokenizer"])
def test_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path, tiny_model_folder: Path, kind: str) -> None:
    model = broken_model(tmp_path, tiny_model_folder, kind)
    with start_model_server(tmp_path, model, "--device", "cpu", "--json-output") as server:
        assert server.wait_until_gone(60) == 1
        errors = [record["text"] for record in server.records() if record["record"]["level"]["no"] >= 40]
        assert len(errors) == 1
        assert errors[0].startswith("could not start: ")
        assert str(model) in errors[0]
        assert "\n" not in errors[0]
        assert server.errors.read_text() == ""
        assert not server.socket.exists()


def test_model_with_too_few_positions_is_refused_by_name_of_the_flag(tmp_path: Path, tiny_model_folder: Path) -> None:
    with start_model_server(tmp_path, tiny_model_folder, "--device", "cpu", "--max-total-tokens", "513") as server:
        assert server.wait_until_gone(60) == 1
        assert (
            "could not start: --max-total-tokens 513 is more than the model's 512 positions" in server.log.read_text()
        )


def test_socket_in_a_missing_folder_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    done = run(SERVE, "--model-id", str(tmp_path), "--uds-path", str(tmp_path / "missing" / "uds"))
    assert done.returncode != 0
    assert str(tmp_path / "missing") in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "could not start" not in done.stdout, "it tried to load the model first"


def test_something_else_in_the_socket_s_place_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "uds-0").write_text("precious")
    done = run(SERVE, "--model-id", str(tmp_path), "--uds-path", str(tmp_path / "uds"))
    assert done.returncode == 1
    assert "is not a socket" in done.stdout
    assert (tmp_path / "uds-0").read_text() == "precious"


def test_client_says_that_no_server_is_there(tmp_path: Path) -> None:
    done = run(TOOLS, "generate", "hello", "--uds-path", str(tmp_path / "uds"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no server at {tmp_path / 'uds-0'}")


def test_client_wants_a_prompt() -> None:
    done = run(TOOLS, "generate", stdin="\n  \n")
    assert done.returncode == 2
    assert "no prompt" in done.stderr


def test_client_prints_what_the_server_refuses_and_what_it_answers(tmp_path: Path) -> None:
    with ready_server(start_scripted_server(tmp_path, Faults())) as server:
        uds_path = str(server.socket).removesuffix("-0")
        done = run(TOOLS, "generate", "--raw", "--uds-path", uds_path, "z" * 300)
        assert done.returncode == 1
        assert re.fullmatch(r"error: request \d+: inputs has 301 tokens, .*\n", done.stderr)
        done = run(
            TOOLS, "generate", "--raw", "--uds-path", uds_path, "--max-new-tokens", "5", *(["one", "two", "three"])
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert re.search(r"^15 tokens, first after \d+ ms, [\d.]+ tokens/s$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]], ids=len)
def test_client_that_cannot_write_its_answer_says_so_and_leaves_no_request_behind(
    tmp_path: Path, prompts: list[str]
) -> None:
    full = ("> /dev/full", "error: the answer cannot be written: No space left on device\n")
    gone = ("| true", "")
    with ready_server(start_scripted_server(tmp_path, Faults())) as server, server.connect() as stub:
        for target, complaint in (full, gone):
            client = f'("$@"; echo $? > {tmp_path / "status"}) {target}'
            words = [sys.executable, "-c", TOOLS, "generate", "--raw", "--uds-path", str(tmp_path / "uds"), *prompts]
            done = subprocess.run(
                ["/bin/sh", "-c", client, "sh", *words], stderr=subprocess.PIPE, text=True, check=False
            )
            assert ((tmp_path / "status").read_text(), done.stderr) == ("1\n", complaint)
            stub.Warmup(pb.WarmupRequest())  # refused while a request is live


def test_client_refuses_a_standard_input_that_is_not_text_or_not_there() -> None:
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8:strict"}
    for shell, complaint in (("printf '\\377' |", "standard input is not text"), ("<&-", "no prompt")):
        words = f'{shell} "$@"' if shell.endswith("|") else f'"$@" {shell}'
        command = ["/bin/sh", "-c", words, "sh", sys.executable, "-c", TOOLS, "generate"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 2
        assert complaint in done.stderr
        assert "Traceback" not in done.stderr


def test_client_refuses_a_prompt_that_is_not_text(tmp_path: Path) -> None:
    with ready_server(start_scripted_server(tmp_path, Faults())):
        command = [sys.executable, "-c", TOOLS, "generate", "--raw", "--uds-path", str(tmp_path / "uds")]
        result = subprocess.run([*command, b"\xff"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: this cannot be sent: ")
    assert len(result.stderr.splitlines()) == 1


def test_client_says_that_the_server_died(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path, Faults(decode_error="the device is on fire")) as server:
        server.wait_for_socket()
        done = run(TOOLS, "generate", "--raw", "--uds-path", str(server.socket).removesuffix("-0"), "hello")
        assert done.returncode == 1
        assert re.fullmatch(
            r"error: (Decode|step ahead) failed: RuntimeError in scripted\.py:\d+ on_step\n", done.stderr
        )
