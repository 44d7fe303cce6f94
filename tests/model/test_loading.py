"""What fits, and what loading costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT
from tpu_tgi_server.model.loading import check_cache_fits

DEMO_MODEL = ROOT / ".cache/SmolLM2-135M-Instruct"

MEASURE = """
import sys
from pathlib import Path
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.runtime.select import select_runtime

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

runtime = select_runtime(Device.CPU)
import transformers.models.llama.modeling_llama
from tpu_tgi_server.engine.loading import load_generator
before = peak()
load_generator(Settings(sys.argv[1], device=Device.CPU, max_total_tokens=16), runtime, lambda *_: None)
print(peak() - before)
"""


def test_cache_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(
        ValueError, match=r"KV cache of 8 slots takes 8.0 GB, and 5.5 GB are free.*--max-batch-size to 5"
    ):
        check_cache_fits(8, bytes_a_slot=10**9, free_bytes=5_500_000_000)


@pytest.mark.parametrize("free_bytes", [8 * 10**9, None])
def test_cache_that_fits_or_may_fit_is_accepted(free_bytes: int | None) -> None:
    check_cache_fits(8, bytes_a_slot=10**9, free_bytes=free_bytes)


@pytest.mark.demo
def test_loading_takes_little_more_memory_than_the_weights() -> None:
    """Files are mapped and not copied; the tokenizer and its vocabulary are the rest."""
    environment = {"PATH": "", "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", MEASURE, str(DEMO_MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    weights = sum(path.stat().st_size for path in Path(DEMO_MODEL).glob("*.safetensors"))
    assert int(done.stdout.splitlines()[-1]) < 1.15 * weights + 200e6
