"""The choice of the runtime."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT
from tpu_tgi_server.config import Device
from tpu_tgi_server.runtime.select import default_compilation_cache, select_runtime

COMPILE_ONE = """
import sys
from pathlib import Path
import torch
from tpu_tgi_server.config import Device
from tpu_tgi_server.runtime.select import select_runtime

def main(rank, runtime):
    step = runtime.prepare(lambda tensor: tensor * 3 + 1, [])
    print(runtime.to_host(step(runtime.to_device(torch.arange(3.0)))).tolist())

runtime = select_runtime(Device.XLA_CPU, Path(sys.argv[1]))
runtime.launch(main, (runtime,))
import torch_xla.debug.metrics as metrics
print(metrics.counter_names())
"""


def run(code: str) -> str:
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_auto_has_to_be_resolved_before() -> None:
    with pytest.raises(ValueError, match="resolve the device first"):
        select_runtime(Device.AUTO)


def test_plain_torch_never_imports_torch_xla() -> None:
    code = "import sys; from tpu_tgi_server.config import Device\n"
    code += "from tpu_tgi_server.runtime.select import select_runtime; runtime = select_runtime(Device.CPU)\n"
    code += "from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM\n"
    code += "print(runtime.device_type, runtime.num_compilations(), 'torch_xla' in sys.modules)"
    assert run(code) == "cpu 0 False"


def test_choosing_xla_touches_no_device() -> None:
    """The device belongs to the process that is spawned for it."""
    code = "from tpu_tgi_server.config import Device; from tpu_tgi_server.runtime.select import select_runtime\n"
    code += "runtime = select_runtime(Device.XLA_CPU); import torch_xla\n"
    code += "print(runtime.device_type, torch_xla._XLAC._xla_runtime_is_initialized())"
    assert run(code) == "xla False"


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The cache of a run that found none, and what it printed."""
    cache = tmp_path_factory.mktemp("first") / "cache"
    return cache, run_with(cache)


@pytest.fixture
def cache(first_run: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the first run's cache."""
    return Path(shutil.copytree(first_run[0], tmp_path / "cache"))


def test_compiled_graphs_are_kept_and_an_unreadable_one_is_compiled_again(
    first_run: tuple[Path, str], cache: Path
) -> None:
    """XLA's CPU client writes its graphs and cannot read them, so the second run falls back."""
    outputs = [first_run[1], run_with(cache)]
    assert [output.splitlines()[0] for output in outputs] == ["[1.0, 4.0, 7.0]"] * 2
    assert list(first_run[0].iterdir())
    assert "PersistentCacheMiss" in outputs[0]
    assert "PersistentCacheDeserializeFailure" in outputs[1]


@pytest.mark.parametrize("environment", [{}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "not/absolute"}])
def test_compiled_graphs_are_kept_in_the_users_cache(environment: dict[str, str]) -> None:
    assert default_compilation_cache(environment) == Path.home() / ".cache" / "tpu-tgi-server"
    assert default_compilation_cache({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/tpu-tgi-server")


def test_folder_for_graphs_that_cannot_be_made_is_no_reason_not_to_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run_with(tmp_path / "file" / "cache").splitlines()[-2] == "[1.0, 4.0, 7.0]"


@pytest.mark.parametrize("content", [b"", b"no graph", bytes(100_000)], ids=["empty", "short", "zeros"])
def test_damaged_graph_is_compiled_again(cache: Path, content: bytes) -> None:
    for path in cache.iterdir():
        path.write_bytes(content)
    assert run_with(cache).splitlines()[0] == "[1.0, 4.0, 7.0]"


def test_folder_that_no_file_can_be_written_to_is_not_used() -> None:
    """One of the kernel's own: even root can write nothing there."""
    output = run_with(Path("/proc/self/fdinfo"))
    assert output.splitlines()[-2] == "[1.0, 4.0, 7.0]"
    assert "PersistentCache" not in output


def run_with(cache: Path) -> str:
    command = [sys.executable, "-c", COMPILE_ONE, str(cache)]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
