"""Modules import in one direction only, and heavy packages stay in their rooms."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ROOT

PACKAGE = "tpu_tgi_server"
SOURCE = ROOT / "src" / PACKAGE

ROOMS = ["client", "plan", "service", "mailbox", "engine", "model", "runtime"]
"""From the top to the bottom. A room may import those below it, and the shared modules, which import no room."""

ALLOWED_ABOVE = {"cli", "progress"}
SHARED = {"config", "logs", "profiling", "pb", "__init__"}

TRACED = ["plan/hollow.py", "plan/reference.py", "plan/trace.py"]
"""Run in the process that traces; the rest of the room is as light as the commands."""

OUTSIDE = {
    "torch_xla": [
        "runtime/xla.py",
        "runtime/xla_mesh.py",
        "runtime/xla_replay.py",
        "runtime/lazy_graph.py",
        "runtime/tracing.py",
    ],
    "torch": ["model", "runtime", *TRACED],
    "transformers": ["engine/tokenizer.py", "engine/loading.py", "model", "client/generate.py", *TRACED],
    "jax": ["plan/compile.py"],
    "jaxlib": ["plan/compile.py"],
    "grpc": ["service", "client"],
    "google.protobuf": [],
    "tpu_tgi_server.pb": ["service", "client"],
    "typer": ["cli"],
    "multiprocessing": ["mailbox"],
}
"""Which parts of the package may import what; generated stubs are not looked at."""


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if "pb" not in path.relative_to(SOURCE).parts]


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of all that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    room = room_of(path)
    imported = {name.split(".")[1] for name in imports_of(path) if name.startswith(f"{PACKAGE}.")} - SHARED
    if room in SHARED:
        assert imported == set()
    elif room not in ALLOWED_ABOVE:
        below = set(ROOMS[ROOMS.index(room) + 1 :])
        above_engine = {"client": set(), "plan": below - {"service", "mailbox"}}
        allowed = above_engine.get(room, below) | {room}
        assert imported <= allowed


@pytest.mark.parametrize("package", OUTSIDE)
def test_packages_stay_in_their_rooms(package: str) -> None:
    importing = [
        str(path.relative_to(SOURCE))
        for path in modules()
        if any(f"{name}.".startswith(f"{package}.") for name in imports_of(path))
    ]
    strangers = [path for path in importing if not any(f"{path}/".startswith(f"{home}/") for home in OUTSIDE[package])]
    assert strangers == []


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in modules()} == {*ROOMS, *ALLOWED_ABOVE, *SHARED} - {"pb"}


@pytest.mark.parametrize("module", ["cli", "service.lifecycle", "mailbox.root", "client.generate"])
def test_root_and_client_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {PACKAGE}.{module}; print(*{{'torch', 'torch_xla', 'transformers'}} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout.split() == []
