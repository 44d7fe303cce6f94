"""Weights of one byte: how they are rounded, and that a model served with them answers as the rounded weights say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.families import save_family
from tests.servers import ROOT
from tpu_tgi_server.config import Quantize
from tpu_tgi_server.model.files import ModelFiles
from tpu_tgi_server.model.int8 import Int8Linear, quantize
from tpu_tgi_server.model.loading import load_weights
from tpu_tgi_server.runtime.cpu import CpuRuntime


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_weight_is_within_half_a_step_of_its_channel(dtype: torch.dtype) -> None:
    weight = (torch.randn(20, 30, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 20)[:, None]).to(
        dtype
    )
    rounded, scale = quantize(weight)
    assert (rounded.dtype, scale.dtype) == (torch.int8, torch.float32)
    assert rounded.abs().amax(dim=1).min() == 127
    error = (rounded.float() * scale[:, None] - weight.float()).abs()
    assert (error <= scale[:, None] * 0.51).all()


def test_channel_of_zeros_stays_zero() -> None:
    rounded, scale = quantize(torch.zeros(2, 3))
    assert rounded.eq(0).all()
    assert scale.isfinite().all()


def int8_model(folder: Path) -> nn.Module:
    model: nn.Module = load_weights(
        ModelFiles(folder, folder), torch.float32, CpuRuntime(), quantize=Quantize.INT8
    ).module
    return model


def test_all_linear_layers_but_the_head_are_of_one_byte(tiny_model_folder: Path) -> None:
    model = int8_model(tiny_model_folder)
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Int8Linear)}
    assert kinds.pop("lm_head") is nn.Linear
    assert len(kinds) == 2 * 7
    assert set(kinds.values()) == {Int8Linear}


def test_loaded_weights_are_the_rounded_ones_of_the_file(tiny_model_folder: Path) -> None:
    rounded = int8_model(tiny_model_folder)
    exact = load_weights(ModelFiles(tiny_model_folder, tiny_model_folder), torch.float32, CpuRuntime()).module
    for name, module in rounded.named_modules():
        if isinstance(module, Int8Linear):
            weight, scale = quantize(exact.get_parameter(f"{name}.weight"))
            assert torch.equal(module.weight, weight)
            assert torch.equal(module.scale, scale)


def test_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    save_family("gpt-2", tmp_path / "model")
    with pytest.raises(ValueError, match="--quantize int8 does nothing"):
        int8_model(tmp_path / "model")


def test_bias_is_kept() -> None:
    linear = nn.Linear(4, 3)
    bias = linear.bias
    layer = Int8Linear(linear)
    layer.weight.fill_(2)
    layer.scale.data.fill_(0.5)
    torch.testing.assert_close(layer(torch.ones(1, 4)), 4 + bias[None])


LARGE_PRODUCT = """
import torch, torch_xla
from torch import nn
from tpu_tgi_server.model.int8 import Int8Linear, quantize
linear = nn.Linear(2, 1, bias=False)
layer = Int8Linear(linear)
layer.weight.data, layer.scale.data = quantize(torch.tensor([[0.25, 0.25]]))
inputs = torch.tensor([[1000.0, 600.0]], dtype=torch.float16)
print(layer.to("xla")(inputs.to("xla")).item())
"""


def test_products_that_are_too_large_for_float16_before_they_are_scaled_are_right_on_a_device() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PJRT_DEVICE": "CPU"}
    command = [sys.executable, "-c", LARGE_PRODUCT]
    output = subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout
    assert float(output) == pytest.approx(400, rel=1e-3)


@pytest.mark.demo
def test_best_tokens_of_the_demo_model_are_those_of_bfloat16() -> None:
    command = [sys.executable, str(ROOT / "scripts/int8_agreement.py"), str(ROOT / ".cache/SmolLM2-135M-Instruct")]
    report = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert report["num_tokens"] >= 2000
    assert report["int8_top1_agreement"] >= 0.95
