"""What loading costs: the peak memory of a fresh process against the size of the weights, for each device and dtype."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.bars import Bar

LIMIT = 1.15
NUM_LAYERS = 36
CASES = tuple((device, dtype) for device in ("cpu", "xla-cpu") for dtype in ("float32", "bfloat16"))
"""Where the model is loaded, and what its float32 file becomes."""


@dataclass(frozen=True)
class LoadingCost:
    """One load in a fresh process, in bytes: the peak before it, the peak after it, and the weights as they are served.

    The process has imported torch and transformers before, and torch_xla if it needs it, and used the device once.
    """

    bare_bytes: int
    peak_bytes: int
    weights_bytes: int

    @property
    def ratio(self) -> float:
        """Memory that loading took for each byte of the weights."""
        return (self.peak_bytes - self.bare_bytes) / self.weights_bytes


def measure_loading() -> list[Bar]:
    """A random Llama of 1.1 GB in float32, made for this."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        costs = {case: load_in_process(Path(folder), *case) for case in CASES}
    worst = max(costs, key=lambda case: costs[case].ratio)
    ratios = ", ".join(f"{device} {dtype} {cost.ratio:.2f}" for (device, dtype), cost in costs.items())
    return [Bar("peak host memory while loading ÷ weights", costs[worst].ratio, LIMIT, "<=", note=ratios)]


def make_model(folder: Path, dtype: str = "float32", num_layers: int = NUM_LAYERS) -> None:
    """Tied embeddings, and 7.3 million parameters a layer."""
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


def load_in_process(folder: Path, device: str, dtype: str) -> LoadingCost:
    """Load the model of a folder with `bench.loading_process`."""
    command = [sys.executable, "-m", "bench.loading_process", str(folder), device, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"bench.loading_process failed:\n{done.stderr}")
    return LoadingCost(**json.loads(done.stdout.splitlines()[-1]))
