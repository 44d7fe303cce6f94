"""Both ways to attend: against scores written out by hand, against torch with grouped heads, and against each other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tpu_tgi_server.model.grouped_attention import attend, attend_by_products, attend_fused

NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 2, 6, 8

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_products(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float) -> Tensor:
    return attend_by_products(query, keys, values, keys.shape[1], visible, scaling, None)


both_ways = pytest.mark.parametrize("attend_in_one_way", [attend_fused, by_products], ids=["fused", "products"])


def heads(num_heads: int, num_tokens: int, num_rows: int = 1) -> Tensor:
    return torch.randn(num_rows, num_heads, num_tokens, HEAD_SIZE)


def some_visible(num_rows: int, num_tokens: int, num_cells: int) -> Tensor:
    mask = torch.rand(num_rows, num_tokens, num_cells) < 0.8
    mask[..., 0] = True
    return mask


def by_hand(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """The formula, with keys and values repeated for each head of a group."""
    keys, values = (tensor.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for tensor in (keys, values))
    scores = query @ keys.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~visible[:, None], float("-inf")), dim=-1)
    return (weights @ values).transpose(1, 2)


@both_ways
@pytest.mark.parametrize("scaling", [HEAD_SIZE**-0.5, 0.3])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 5), (3, 5), (3, 1)])
def test_grouped_heads_equal_repeated_ones(
    attend_in_one_way: Attend, num_rows: int, num_tokens: int, scaling: float
) -> None:
    query = heads(NUM_HEADS, num_tokens, num_rows)
    keys, values = heads(NUM_KV_HEADS, 7, num_rows), heads(NUM_KV_HEADS, 7, num_rows)
    visible = some_visible(num_rows, num_tokens, 7)
    torch.testing.assert_close(
        attend_in_one_way(query, keys, values, visible, scaling), by_hand(query, keys, values, visible, scaling, None)
    )


@both_ways
def test_whole_blocks_of_cells_may_be_hidden(attend_in_one_way: Attend) -> None:
    """Torch goes through cells in blocks of 512, in the first of which these queries see nothing."""
    query = heads(NUM_HEADS, 3)
    keys, values = heads(NUM_KV_HEADS, 1100), heads(NUM_KV_HEADS, 1100)
    keys[:, :, :600], values[:, :, :600] = 1e18, -1e18
    visible = torch.zeros(1, 3, 1100, dtype=torch.bool)
    for token, first in enumerate((600, 1024, 1099)):
        visible[:, token, first:] = True
    torch.testing.assert_close(
        attend_in_one_way(query, keys, values, visible, 0.3), by_hand(query, keys, values, visible, 0.3, None)
    )


def test_scores_are_capped() -> None:
    query, keys, values = heads(NUM_HEADS, 5), heads(NUM_KV_HEADS, 5), heads(NUM_KV_HEADS, 5)
    visible = some_visible(1, 5, 5)
    output = attend(query, keys, values, NUM_KV_HEADS, visible, 0.9, 2.0)
    torch.testing.assert_close(output, by_hand(query, keys, values, visible, 0.9, 2.0))


@both_ways
def test_sums_are_float32(attend_in_one_way: Attend) -> None:
    query, keys, values = (heads(count, 4).bfloat16() for count in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    visible = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    exact = scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=visible[:, None], scale=0.3, enable_gqa=True
    )
    output = attend_in_one_way(query, keys, values, visible, 0.3)
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output, exact.transpose(1, 2).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_heads_side_by_side_in_the_cache_change_no_result(num_tokens: int, softcap: float | None) -> None:
    query = heads(NUM_HEADS, num_tokens, num_rows=2)
    keys, values = heads(NUM_KV_HEADS, 7, num_rows=2), heads(NUM_KV_HEADS, 7, num_rows=2)
    row_keys, row_values = (tensor.transpose(1, 2).reshape(2, 1, 7, -1) for tensor in (keys, values))
    visible = some_visible(2, num_tokens, 7)
    torch.testing.assert_close(
        attend(query, row_keys, row_values, NUM_KV_HEADS, visible, 0.3, softcap),
        attend(query, keys, values, NUM_KV_HEADS, visible, 0.3, softcap),
    )
