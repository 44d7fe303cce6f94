"""What a decode step cannot do without reading, as a graph of its own: what the server's graph is measured against.

A compiler's count of bytes includes what it carries into on-chip memory and out again, so a count means little alone.
This graph streams the same weights through the same matrix products in the same order, and reads the same cache once.
It has no norms, rotations, activations, masks, softmax or cache writes, and its result means nothing. It is a yardstick
and no minimum: the compiler may count more bytes for it than for the server's graph, see docs/plan.md.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tpu_tgi_server.model.cache import StaticCacheXla
from tpu_tgi_server.model.head_rows import HeadRows, fill_lanes, fill_rows, heads_a_row, to_rows

PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class ReferenceStep:
    """Owns nothing but references to a model and to its cache.

    Raises:
        ValueError: the model's layers do not consist of Llama's seven matrices.
    """

    def __init__(self, model: PreTrainedModel, cache: StaticCacheXla) -> None:
        self._model = model
        self._cache = cache
        self._layers = [*model.get_decoder().layers]
        expected = {f"{part}.{name}" for part, names in PROJECTIONS.items() for name in names}
        for layer in self._layers:
            if {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)} != expected:
                raise ValueError("there is no reference for this model: its layers are not of Llama's seven matrices")

    def decode(self, tokens_and_lens: Tensor, context_len: int) -> Tensor:
        """Arguments of `DeviceSteps.decode`; the result is some float32 [B]."""
        hidden: Tensor = self._model.get_input_embeddings()(tokens_and_lens[0])
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attention(layer.self_attn, hidden, *self._cache.read(number, context_len))
            hidden = hidden + layer.mlp.down_proj(layer.mlp.gate_proj(hidden) * layer.mlp.up_proj(hidden))
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits.float().amax(-1)

    def _attention(self, projections: Any, hidden: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Two products with the cache, [B, K / P, C, W] each; all P heads of a row meet all queries of the row."""
        num_slots, num_rows, _, row_size = keys.shape
        new = (projections.k_proj(hidden) + projections.v_proj(hidden)).reshape(num_slots, -1, projections.head_dim)
        num_heads = new.shape[1]
        num_side_by_side = heads_a_row(HeadRows(num_rows, row_size), num_heads, projections.head_dim)
        queries = projections.q_proj(hidden).reshape(num_slots, num_heads, -1, projections.head_dim)
        queries = fill_rows(queries, num_side_by_side).reshape(num_slots, num_rows, -1, projections.head_dim)
        queries = fill_lanes(queries.repeat(1, 1, 1, num_side_by_side), row_size)
        sums = (queries + to_rows(new, HeadRows(num_rows, row_size))[:, :, None]) @ keys.mT @ values
        sums = (
            sums[..., : num_side_by_side * projections.head_dim]
            .reshape(num_slots, num_rows, -1, num_side_by_side, projections.head_dim)
            .sum(-2)
        )
        heads = sums.reshape(num_slots, num_rows * num_side_by_side, -1)[:, :num_heads]
        output: Tensor = projections.o_proj(heads.reshape(num_slots, -1))
        return output
