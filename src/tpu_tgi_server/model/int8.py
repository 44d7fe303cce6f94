"""Weight-only int8: linear layers keep one signed byte a weight and one factor an output channel.

A weight is rounded as it comes from its file, so that the host never holds all of them in the serving dtype.
"""

from typing import Any

import torch
from torch import Tensor, nn

MAX_INT8 = 127


class Int8Linear(nn.Module):
    """Owns the int8 weight [out, in] and the factors [out] of what was an `nn.Linear`.

    The weight is converted inside the matrix product, whose result is scaled: XLA reads one byte a weight for that.
    The product is bfloat16 on a device, for a model that is, and float32 otherwise: before it is scaled it may be
    hundreds of times larger than float16 reaches, and many plain processors have no instructions for bfloat16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = torch.empty_like(linear.weight, dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        scale = torch.empty_like(linear.weight[:, 0], dtype=torch.float32)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        is_bfloat16 = inputs.dtype is torch.bfloat16 and inputs.device.type != "cpu"
        dtype = torch.bfloat16 if is_bfloat16 else torch.float32
        outputs = ((inputs.to(dtype) @ self.weight.to(dtype).T) * self.scale).to(inputs.dtype)
        return outputs if self.bias is None else outputs + self.bias


def replace_linears(model: Any) -> None:
    """Turn every linear layer but the head into an `Int8Linear`. The model has no weights yet.

    Raises:
        ValueError: there is none, as in GPT-2, whose layers are of transformers' own `Conv1D`.
    """
    head = model.get_output_embeddings()
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    names = [name for name, module in linears.items() if module is not head]
    if not names:
        raise ValueError("--quantize int8 does nothing for this model: it has no linear layers besides its head")
    for name in names:
        model.set_submodule(name, Int8Linear(linears[name]))


def quantize_parameter(model: Any, name: str, value: Tensor) -> dict[str, Tensor]:
    """What is stored for a parameter: weight and factors if it belongs to an `Int8Linear`, else itself."""
    module_name, _, leaf = name.rpartition(".")
    if leaf != "weight" or not isinstance(model.get_submodule(module_name), Int8Linear):
        return {name: value}
    weight, scale = quantize(value)
    return {name: weight, f"{module_name}.scale": scale}


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output channel to its own grid, symmetric around 0.

    Args:
        weight: [out, in].

    Returns:
        int8 [out, in] and float32 factors [out] (float16 would round small ones to 0), whose product is close.
    """
    scale = (weight.abs().amax(dim=1).float() / MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)
    steps = (weight.float() / scale[:, None]).round().clamp(-MAX_INT8, MAX_INT8)
    return steps.to(torch.int8), scale
