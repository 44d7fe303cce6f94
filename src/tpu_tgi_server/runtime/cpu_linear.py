"""Linear layers that are faster on a plain processor, put in place of those of a loaded model.

What torch does with a few rows (M) and a weight [N, K] on a processor without AMX or AVX-512, measured on two cores of
an AMD EPYC (Milan) with torch 2.9, weights out of the cache, in milliseconds, torch's way first:

    float32,  8 rows, [1536, 576]    0.60  0.44   weight reordered by oneDNN, once, when the model is loaded
    float32,  8 rows, [49152, 576]   27    15     the product transposed, for a weight that the embedding needs as it is
    bfloat16, 64 rows, [1536, 576]   6.6   1.8    blocks of the weight in float32, as there are no bfloat16 instructions

No weight is kept twice: the reordered one replaces the other. Results differ from torch's by rounding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

MAX_TRANSPOSED_ROWS = 32
"""With more rows than this torch's own order is as fast."""

MIN_WIDENED_ROWS = 9
"""With fewer rows bfloat16 is read once a row, which costs less than turning it into float32."""

BLOCK_ROWS = 512
"""How many rows of a bfloat16 weight are float32 at a time."""

PACKING_ROWS = 8
"""For how many rows of input oneDNN lays the weight out. Other numbers of rows work, and are as fast."""


class PackedLinear(nn.Module):
    """Owns a float32 weight in the order that oneDNN multiplies fastest."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKING_ROWS)
        self.register_buffer("weight", packed, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self.weight, self.bias, "none", [], "")
        return output


class SharedLinear(nn.Linear):
    """Owns nothing: a float32 weight that an embedding uses too, and that therefore stays as it is."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not 1 < num_rows(inputs) <= MAX_TRANSPOSED_ROWS:
            return super().forward(inputs)
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = (self.weight @ rows.t()).t().contiguous().reshape(*inputs.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


class WidenedLinear(nn.Linear):
    """Owns nothing: a bfloat16 weight on a processor that has no instructions for bfloat16."""

    def forward(self, inputs: Tensor) -> Tensor:
        if num_rows(inputs) < MIN_WIDENED_ROWS:
            return super().forward(inputs)
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        blocks = (
            functional.linear(rows, block.float()).to(inputs.dtype) for block in torch.split(self.weight, BLOCK_ROWS)
        )
        output = torch.cat(list(blocks), dim=-1).reshape(*inputs.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def num_rows(inputs: Tensor) -> int:
    """How many vectors a layer multiplies."""
    return inputs.numel() // inputs.shape[-1]


def speed_up_linear(model: nn.Module) -> None:
    """Replace the linear layers of a model on the CPU. Subclasses of `nn.Linear` and other dtypes stay as they are."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    # no list holds a layer that is replaced, or all weights would be there twice
    for parent in [module for module in model.modules() if type(module) is not nn.Linear]:
        for name in [name for name, layer in parent.named_children() if type(layer) is nn.Linear]:
            layer = parent.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            setattr(parent, name, faster(layer, is_shared=uses[id(layer.weight)] > 1))
            del layer


def faster(layer: nn.Linear, is_shared: bool) -> nn.Module:
    """The layer to use in place of this one, which may be itself."""
    if layer.weight.dtype is torch.float32 and has_onednn():
        return like(layer, SharedLinear) if is_shared else PackedLinear(layer)
    if layer.weight.dtype is torch.bfloat16 and not has_bfloat16_instructions():
        return like(layer, WidenedLinear)
    return layer


def like(layer: nn.Linear, kind: type[nn.Linear]) -> nn.Linear:
    """The same parameters in a layer of another kind."""
    layer.__class__ = kind
    return layer


def has_bfloat16_instructions() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor; if not, torch reads the weight once for every row."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn() -> bool:
    """Whether this build of torch has it."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
