"""What loading costs: peak memory of a fresh process against the size of the weights, for each device and dtype.

    python scripts/bench_loading.py [NUM_LAYERS]

makes a random Llama in a temporary folder (36 layers are 1.1 GB in float32), loads it in a process of its own for each
case, and prints one JSON line. `ratio` is (peak − bare process) ÷ weights in the dtype they are served in, where the
bare process has imported torch and transformers, and torch_xla if it needs it.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

DEVICES = ("cpu", "xla-cpu")
FILE_DTYPES = ("float32", "bfloat16")
SERVED_DTYPES = ("float32", "bfloat16", "int8")
"""int8 is the weights of linear layers, the rest bfloat16."""

CHILD = """
import json, sys, time
from pathlib import Path
import torch
from tpu_tgi_server.config import Device, Quantize
from tpu_tgi_server.runtime.select import select_runtime

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def main(rank, runtime, folder, dtype):
    import transformers.models.llama.modeling_llama
    from tpu_tgi_server.model import loading
    from tpu_tgi_server.model.files import ModelFiles

    runtime.run(lambda tensor: tensor + 1, runtime.to_device(torch.ones(1)))  # the device's own threads and buffers
    bare, started = peak_bytes(), time.perf_counter()
    is_int8 = dtype == "int8"
    served = torch.bfloat16 if is_int8 else getattr(torch, dtype)
    quantize = Quantize.INT8 if is_int8 else None
    model = loading.load_weights(ModelFiles(folder, folder), served, runtime, quantize=quantize)
    seconds = time.perf_counter() - started
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    print(json.dumps({"bare_bytes": bare, "peak_bytes": peak_bytes(), "weights_bytes": weights, "seconds": seconds}))

runtime = select_runtime(Device(sys.argv[1]))
runtime.launch(main, (runtime, Path(sys.argv[2]), sys.argv[3]))
"""


@dataclass(frozen=True)
class LoadingCost:
    """One load in a fresh process; `peak_bytes` is VmHWM, `bare_bytes` the same before the load."""

    device: str
    file_dtype: str
    served_dtype: str
    bare_bytes: int
    peak_bytes: int
    weights_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Memory that loading took for each byte of the weights as they are served; the bar is 1.15."""
        return (self.peak_bytes - self.bare_bytes) / self.weights_bytes


def make_model(folder: Path, dtype: str, num_layers: int) -> None:
    """A random Llama with tied embeddings; each layer is 7.3 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=6,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="300MB")


def measure(folder: Path, device: str, file_dtype: str, served_dtype: str) -> LoadingCost:
    """Load the model of a folder in a fresh process."""
    command = [sys.executable, "-c", CHILD, device, str(folder), served_dtype]
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return LoadingCost(device, file_dtype, served_dtype, **json.loads(done.stdout.splitlines()[-1]))


def main(num_layers: int = 36) -> None:
    costs = []
    with tempfile.TemporaryDirectory() as root:
        for file_dtype in FILE_DTYPES:
            folder = Path(root) / file_dtype
            make_model(folder, file_dtype, num_layers)
            costs += [measure(folder, device, file_dtype, served) for device in DEVICES for served in SERVED_DTYPES]
    print(json.dumps({"loading": [{**asdict(cost), "ratio": round(cost.ratio, 3)} for cost in costs]}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
