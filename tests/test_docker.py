"""The parts of the Docker image that run without Docker: entry point, health check, wheel, and what is copied."""

import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.servers import ROOT

SIZES = {
    "MAX_BATCH_SIZE": "16",
    "MAX_TOTAL_TOKENS": "4096",
    "MAX_INPUT_TOKENS": "3072",
    "MAX_BATCH_PREFILL_TOKENS": "4096",
}
FAKE_LAUNCHER = '#!/bin/sh\necho "$$"; which text-generation-router; env; echo; printf "%s\\n" "$@"; exit 7\n'


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of TGI's programs, with a launcher that only says how it was called."""
    for name in ("text-generation-launcher", "v2/text-generation-router", "v3/text-generation-router"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE_LAUNCHER)
        path.chmod(0o755)
    return tmp_path


def enter(home: Path, *arguments: str, **variables: str) -> tuple[Path, dict[str, str], list[str]]:
    """The router that the launcher would find, its environment, and its arguments; it must have taken the entry
    point's place, and its exit status must come through.
    """
    process = subprocess.Popen(
        [ROOT / "docker/entrypoint.sh", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "TGI_HOME": str(home), **variables},
    )
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 7
    (pid, router, *environment), words = (part.splitlines() for part in output.split("\n\n", 1))
    assert int(pid) == process.pid
    return Path(router), dict(line.split("=", 1) for line in environment), words


def test_entry_point_becomes_the_launcher_with_every_argument_as_it_is(home: Path) -> None:
    _, _, words = enter(home, "--model-id", "a folder/with spaces", "--json-output", "*")
    assert words == ["--model-id", "a folder/with spaces", "--json-output", "*"]


@pytest.mark.parametrize(
    ("variables", "version"), [({}, "v3"), ({"TGI_ROUTER": "v3"}, "v3"), ({"TGI_ROUTER": "v2"}, "v2")]
)
def test_router_is_chosen_by_a_variable(home: Path, variables: dict[str, str], version: str) -> None:
    router, _, _ = enter(home, **variables)
    assert router == home / version / "text-generation-router"


def test_unknown_router_is_refused(home: Path) -> None:
    done = subprocess.run(
        [ROOT / "docker/entrypoint.sh"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "TGI_HOME": str(home), "TGI_ROUTER": "v4"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: TGI_ROUTER must be v2 or v3, not v4\n"


def sizes_of(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("MAX_")}


def test_sizes_have_defaults_that_both_routers_accept(home: Path) -> None:
    _, environment, _ = enter(home, "--max-concurrent-requests", "64")
    assert sizes_of(environment) == SIZES
    slots, total, longest, prefill = map(int, SIZES.values())
    assert longest < total
    assert longest <= prefill <= slots * total
    assert total <= slots * total


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--max-total-tokens", "2048"], {}),
        (["--max-input-length=512"], {}),
        (["--max-input-tokens", "512"], {}),
        (["--max-batch-size=4"], {}),
        (["--max-batch-prefill-tokens", "512"], {}),
        ([], {"MAX_INPUT_LENGTH": "512"}),
        ([], {"MAX_BATCH_SIZE": "4"}),
    ],
)
def test_whoever_gives_one_size_decides_about_all(home: Path, arguments: list[str], variables: dict[str, str]) -> None:
    _, environment, _ = enter(home, *arguments, **variables)
    assert sizes_of(environment) == variables


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (None, False)])
def test_health_check_asks_the_router(status: int | None, is_healthy: bool) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status or 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    if status is None:
        server.shutdown()
        server.server_close()
    environment = {"PORT": str(server.server_port)}
    done = subprocess.run([sys.executable, ROOT / "docker/healthcheck.py"], env=environment, check=False)
    server.shutdown()
    server.server_close()
    thread.join()
    assert (done.returncode == 0) is is_healthy
    assert asked == ([] if status is None else ["/health"])


def copied_from_here() -> list[str]:
    """What the Dockerfile copies from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_all_that_is_copied_exists_and_is_in_the_build_context() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied_from_here():
        assert (ROOT / source).exists()
        assert Path(source).parts[0] in allowed


def test_wheel_from_the_build_context_installs_the_commands(tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    for source in copied_from_here():
        target = context / Path(source).name
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("pb", "__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / source, target)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, context], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", *offline, wheel], check=True)
    commands = {"tpu-tgi-serve", "tpu-tgi", "text-generation-server"}
    assert commands <= {path.name for path in (tmp_path / "venv/bin").iterdir()}
    listing = "from importlib.metadata import entry_points as e; print(*e(group='console_scripts').names)"
    done = subprocess.run([python, "-I", "-c", listing], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == commands
    stubs = "import importlib.util as u; print(u.find_spec('tpu_tgi_server.pb.v2').origin)"
    done = subprocess.run([python, "-I", "-c", stubs], capture_output=True, text=True, check=True)
    assert str(tmp_path / "venv") in done.stdout
