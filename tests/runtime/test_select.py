"""The choice of the runtime."""

import subprocess
import sys

import pytest

from tests.servers import ROOT
from tpu_tgi_server.config import Device
from tpu_tgi_server.runtime.select import select_runtime


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
