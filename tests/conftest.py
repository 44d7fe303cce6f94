"""What all tests share. The tests' own process never touches XLA: where it matters, a subprocess does."""

import os

os.environ["USE_TORCH_XLA"] = "0"  # or transformers imports torch_xla
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # tiny models gain nothing from threads, and busy machines lose much
os.environ.pop("PJRT_DEVICE", None)
# XLA on the CPU then compiles a graph in a quarter of the time; what it computes is the same
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

from pathlib import Path

import hypothesis
import pytest

from tests.tiny_model import save_tiny_model, save_windowed_model

# the same examples everywhere, however slow the machine
hypothesis.settings.register_profile("tests", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama, see `tests.tiny_model`."""
    folder = tmp_path_factory.mktemp("tiny-model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def windowed_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Qwen2 with a sliding window in its second layer, see `tests.tiny_model`."""
    folder = tmp_path_factory.mktemp("windowed-model")
    save_windowed_model(folder)
    return folder
