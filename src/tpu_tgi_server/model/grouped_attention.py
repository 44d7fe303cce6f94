"""Grouped-query attention, which never repeats keys and values for the heads of a group.

Shapes: N rows, T tokens, C cells that may be seen, H query heads, K key/value heads, G = H / K, D head size,
P key/value heads side by side in a row of the cache.
Scores and their weighted sum are float32: rounding them to bfloat16 first changes greedy answers.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tpu_tgi_server.model.cache import fill_rows


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_kv_heads: int,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Attention in the way that suits the device.

    Args:
        query: [N, H, T, D].
        keys: [N, K / P, C, P D], P heads side by side; P is 1 unless the cache says otherwise.
        values: [N, K / P, C, P D].
        num_kv_heads: K.
        visible: bool [N or 1, T, C]. Each query sees something.
        scaling: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2; None for off.

    Returns:
        [N, T, H, D], in the query's dtype.
    """
    if query.device.type == "cpu" and softcap is None and keys.shape[-1] == query.shape[-1]:
        return attend_fused(query, keys, values, visible, scaling)
    return attend_by_products(query, keys, values, num_kv_heads, visible, scaling, softcap)


def attend_fused(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Torch's own operator, twice as fast on a processor. Shapes as for `attend`, with P = 1.

    The mask is added to scores, so keys in cells that nobody sees must be finite too.
    """
    num_rows, num_heads, num_tokens, head_size = query.shape
    num_groups = num_heads // keys.shape[1]
    grouped = query.float().reshape(num_rows, keys.shape[1], -1, head_size)
    mask = visible.repeat(1, num_groups, 1)[:, None]
    output = scaled_dot_product_attention(grouped, keys.float(), values.float(), attn_mask=mask, scale=scaling)
    return output.reshape(num_rows, num_heads, num_tokens, head_size).transpose(1, 2).to(query.dtype)


def attend_by_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_kv_heads: int,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """Written out, so that a TPU makes no float32 copy of keys and values. Shapes as for `attend`.

    The queries of a group are rows of one matrix, so that the product reads every key once, and converts it on the way.
    """
    num_rows, num_heads, num_tokens, head_size = query.shape
    num_side_by_side = keys.shape[-1] // head_size
    grouped = (query.float() * scaling).reshape(num_rows, num_kv_heads, -1, head_size)
    # a product of matrices would fold [N, K] into one axis, and a split of the heads over cores would be lost
    products = torch.einsum("nkrd,nkcd->nkrc", spread(grouped, num_side_by_side), keys.float())
    scores = products.reshape(num_rows, keys.shape[1] * num_side_by_side, -1, num_tokens, keys.shape[2])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~visible[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(torch.float32).min), dim=-1)
    sums = torch.einsum("nkrc,nkcd->nkrd", weights.reshape(products.shape), values.float())
    output = gather(sums, num_side_by_side)[:, :num_kv_heads]
    return output.reshape(num_rows, num_heads, num_tokens, head_size).transpose(1, 2).to(query.dtype)


def spread(queries: Tensor, num_side_by_side: int) -> Tensor:
    """[N, K, R, D] to [N, K / P, P R, P D]: in a row of P heads a query stands where its own head is, beside zeros."""
    if num_side_by_side == 1:
        return queries
    num_rows, _, num_queries, head_size = queries.shape
    filled = fill_rows(queries, num_side_by_side)
    heads = filled.reshape(num_rows, -1, num_side_by_side, num_queries, 1, head_size)
    blocks = heads * diagonal(num_side_by_side, queries.device)[:, None, :, None]
    return blocks.reshape(num_rows, -1, num_side_by_side * num_queries, num_side_by_side * head_size)


def gather(sums: Tensor, num_side_by_side: int) -> Tensor:
    """[N, K / P, P R, P D] to [N, K, R, D]: of the weighted sums over rows of P heads, each head's own."""
    if num_side_by_side == 1:
        return sums
    num_rows, _, num_queries, row_size = sums.shape
    sizes = (num_side_by_side, num_queries // num_side_by_side, num_side_by_side, row_size // num_side_by_side)
    blocks = sums.reshape(num_rows, -1, *sizes) * diagonal(num_side_by_side, sums.device)[:, None, :, None]
    return blocks.sum(-2).reshape(num_rows, -1, sizes[1], sizes[3])


def diagonal(size: int, device: torch.device) -> Tensor:
    """float32 [size, size], ones on the diagonal."""
    numbers = torch.arange(size, dtype=torch.int32, device=device)
    return (numbers[:, None] == numbers[None, :]).float()
