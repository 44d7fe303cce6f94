"""How many bytes a model's weights and slots take, from a model that has shapes and no values."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from tpu_tgi_server.config import Quantize
from tpu_tgi_server.model import int8
from tpu_tgi_server.model.cache import CacheSizes, heads_a_row
from tpu_tgi_server.model.probe import AttentionCall
from tpu_tgi_server.model.ring import ring_len


def weight_bytes(model_class: Any, config: PreTrainedConfig, dtype: torch.dtype, quantize: Quantize | None) -> int:
    """All weights as they are served, shared ones once."""
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype)
        if quantize is Quantize.INT8:
            int8.replace_linears(model)
    model.tie_weights()
    return sum(parameter.nbytes for parameter in model.parameters())


def slot_bytes(layers: Sequence[AttentionCall], dtype: torch.dtype, cache: CacheSizes) -> int:
    """Keys and values of one slot on one core of a TPU, see `cache.heads_a_row`."""
    num_heads, head_size = layers[0].num_heads, layers[0].key_size
    num_side_by_side = heads_a_row(num_heads, head_size)
    row_numbers = -(-num_heads // num_side_by_side) * num_side_by_side * head_size
    lengths = (ring_len(layer.window, cache.max_step_tokens, cache.max_slot_len) for layer in layers)
    return 2 * row_numbers * sum(lengths) * dtype.itemsize
