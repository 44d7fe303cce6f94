"""Grouped-query attention, which never repeats keys and values for the heads of a group.

Shapes: N rows, T tokens, C cells that may be seen, H query heads, K key/value heads, G = H / K, D head size,
the cache holds them in rows of W numbers, of P heads side by side, see `model.head_rows`.
Scores and their weighted sum are float32: rounding them to bfloat16 first changes greedy answers.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tpu_tgi_server.model.head_rows import HeadRows, fill_lanes, gather, heads_a_row, spread


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
        keys: [N, K / P, C, W], K / P rounded up; [N, K, C, D] unless the cache says otherwise.
        values: [N, K / P, C, W].
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
    """Torch's own operator, twice as fast on a processor. Shapes as for `attend`, with rows of one head.

    The mask is added to scores, so keys in cells that nobody sees must be finite too.
    """
    num_rows, num_heads, num_tokens, head_size = query.shape
    num_groups = num_heads // keys.shape[1]
    grouped = query.float().reshape(num_rows, keys.shape[1], -1, head_size)
    # one token's mask is that of its whole group; others are told for each row
    mask = (visible if num_tokens == 1 else visible.repeat(1, num_groups, 1))[:, None]
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
    num_side_by_side = heads_a_row(HeadRows(keys.shape[1], keys.shape[3]), num_kv_heads, head_size)
    grouped = (query.float() * scaling).reshape(num_rows, num_kv_heads, -1, head_size)
    # a product of matrices would fold [N, K] into one axis, and a split of the heads over cores would be lost
    rows = fill_lanes(spread(grouped, num_side_by_side), keys.shape[-1])
    products = torch.einsum("nkrd,nkcd->nkrc", rows, keys.float())
    scores = products.reshape(num_rows, keys.shape[1] * num_side_by_side, -1, num_tokens, keys.shape[2])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~visible[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(torch.float32).min), dim=-1)
    sums = torch.einsum("nkrc,nkcd->nkrd", weights.reshape(products.shape), values.float())
    output = gather(sums[..., : num_side_by_side * head_size], num_side_by_side)[:, :num_kv_heads]
    return output.reshape(num_rows, num_heads, num_tokens, head_size).transpose(1, 2).to(query.dtype)
