"""Loads a model as the server does, and prints what memory that took.

    python -m bench.loading_process FOLDER DEVICE DTYPE

int8 is the weights of linear layers, the rest is bfloat16 then.
"""

import json
import sys
from pathlib import Path

import torch

from tpu_tgi_server.config import Device, Quantize
from tpu_tgi_server.runtime.interface import Runtime
from tpu_tgi_server.runtime.select import select_runtime


def peak_bytes() -> int:
    """The most memory that this process has held so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run(_rank: int, runtime: Runtime, folder: Path, dtype: str) -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401 - part of the bare process

    from tpu_tgi_server.model import loading
    from tpu_tgi_server.model.files import ModelFiles

    step = runtime.prepare(lambda tensor: tensor + 1, [])
    runtime.to_host(step(runtime.to_device(torch.ones(1))))  # the device's own threads and buffers
    bare_bytes = peak_bytes()
    quantize = Quantize.INT8 if dtype == "int8" else None
    served = torch.bfloat16 if quantize else getattr(torch, dtype)
    model = loading.load_weights(ModelFiles(folder, folder), served, runtime, quantize=quantize).module
    weights_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    runtime.tune(model)
    print(json.dumps({"bare_bytes": bare_bytes, "peak_bytes": peak_bytes(), "weights_bytes": weights_bytes}))


if __name__ == "__main__":
    chosen = select_runtime(Device(sys.argv[2]))
    chosen.launch(run, (chosen, Path(sys.argv[1]), sys.argv[3]))
