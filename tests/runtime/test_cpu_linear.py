"""Layers put in place of `nn.Linear` compute the same, and hold each weight once."""

import pytest
import torch
from torch import Tensor, nn

from tpu_tgi_server.runtime import cpu_linear
from tpu_tgi_server.runtime.cpu_linear import PackedLinear, SharedLinear, WidenedLinear, speed_up_linear

NUM_ROWS = (1, 2, 8, 9, 16, 33, 200)


class TiedModel(nn.Module):
    """An embedding, a layer, and a head that shares the embedding's weight."""

    def __init__(self, has_bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1100, 48)
        self.layer = nn.Linear(48, 48, bias=has_bias)
        self.head = nn.Linear(48, 1100, bias=has_bias)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(ids)))
        return logits


def make_model(dtype: torch.dtype, has_bias: bool) -> TiedModel:
    torch.manual_seed(0)
    return TiedModel(has_bias).to(dtype)


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def has_bias(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "has_bfloat16_instructions", lambda: False)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_float32_results_are_those_of_torch(num_rows: int, has_bias: bool) -> None:
    model, faster = make_model(torch.float32, has_bias), make_model(torch.float32, has_bias)
    speed_up_linear(faster)
    ids = torch.arange(num_rows)[:, None]
    assert [type(layer) for layer in (faster.layer, faster.head)] == [PackedLinear, SharedLinear]
    assert_close(faster(ids), model(ids), 1e-5)


@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_bfloat16_results_are_those_of_torch_to_its_precision(num_rows: int, has_bias: bool) -> None:
    model, faster = make_model(torch.bfloat16, has_bias), make_model(torch.bfloat16, has_bias)
    speed_up_linear(faster)
    ids = torch.arange(num_rows)[None]
    assert [type(layer) for layer in (faster.layer, faster.head)] == [WidenedLinear, WidenedLinear]
    assert_close(faster(ids), model(ids), 2**-7)


def test_a_weight_that_an_embedding_shares_stays_one_tensor() -> None:
    model = make_model(torch.float32, has_bias=False)
    speed_up_linear(model)
    assert model.head.weight is model.embedding.weight


def test_a_packed_layer_keeps_no_other_copy_and_the_sizes_of_its_weight() -> None:
    model = make_model(torch.float32, has_bias=True)
    speed_up_linear(model)
    assert {name for name, _ in model.layer.named_parameters()} == {"bias"}
    assert (model.layer.weight.shape, model.layer.weight.dtype) == ((48, 48), torch.float32)


def test_float16_and_subclasses_stay_as_they_are() -> None:
    class Other(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(4, 4).half(), Other(4, 4)])
    speed_up_linear(model)
    assert [type(layer) for layer in model] == [nn.Linear, Other]


def assert_close(result: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within a share of the largest value."""
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    assert float((result - expected).abs().max()) <= tolerance * float(expected.abs().max())
