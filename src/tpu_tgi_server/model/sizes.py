"""How many bytes a model's weights and slots take, from a model that has shapes and no values."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from tpu_tgi_server.config import Quantize
from tpu_tgi_server.model import int8
from tpu_tgi_server.model.cache import CacheSizes
from tpu_tgi_server.model.head_rows import head_rows
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
    """Keys and values of one slot on one core of a TPU, in rows of `head_rows`."""
    rows = head_rows(layers[0].num_heads, layers[0].key_size)
    lengths = (ring_len(layer.window, cache.max_step_tokens, cache.max_slot_len) for layer in layers)
    return 2 * rows.num_rows * rows.row_size * sum(lengths) * dtype.itemsize
