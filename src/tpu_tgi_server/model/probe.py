"""What a model asks of attention, found by running it once on tensors without data.

Whether a model can be served does not follow from its name: what counts is that every layer of it goes through
transformers' attention interface, and asks for nothing there that the slot cache cannot give.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

PROBE_NAME = "slot_cache_probe"
NUM_TOKENS = 2

FULL, SLIDING = "full_attention", "sliding_attention"
DATA_DEPENDENT_ROPE = "dynamic"
"""The rotary base follows the longest sequence that runs: an answer would depend on its neighbours."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function."""

    layer: int
    num_heads: int
    key_size: int
    value_size: int
    window: int | None
    is_causal: bool
    has_sinks: bool


def attention_calls(model_class: Any, config: PreTrainedConfig) -> list[AttentionCall]:
    """The calls of one forward pass, in their order.

    Raises:
        Exception: whatever the model raises when it is run this way.
    """
    calls: list[AttentionCall] = []

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append(
            AttentionCall(
                layer=int(getattr(module, "layer_idx", -1)),
                num_heads=key.shape[1],
                key_size=key.shape[-1],
                value_size=value.shape[-1],
                window=kwargs.get("sliding_window"),
                is_causal=bool(getattr(module, "is_causal", True)),
                has_sinks=kwargs.get("s_aux") is not None,
            )
        )
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(PROBE_NAME, record)
    config = copy.deepcopy(config)
    config._attn_implementation = PROBE_NAME
    config._experts_implementation = "batched_mm"
    with torch.device("meta"), torch.inference_mode():
        tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int32)
        model_class(config).eval()(input_ids=tokens, position_ids=tokens, use_cache=False)
    return calls


def layers_to_serve(model_class: Any, config: PreTrainedConfig, folder: Path) -> list[AttentionCall]:
    """What each layer of the model in a folder asks of the slot cache.

    Raises:
        ValueError: the model cannot be served right; the message says why.
    """
    subject = f"{folder} is a {config.model_type} model and"
    reason = _reason_against_config(model_class, config)
    if reason is not None:
        raise ValueError(f"{subject} {reason}")
    try:
        calls = attention_calls(model_class, config)
    except Exception as error:
        raise ValueError(f"{subject} cannot be run with the attention of the slots: {error}") from error
    reason = _reason_against_calls(calls, config.get_text_config())
    if reason is not None:
        raise ValueError(f"{subject} {reason}")
    return calls


def _reason_against_config(model_class: Any, config: PreTrainedConfig) -> str | None:
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        return "is quantized already: choose a model that is not, and --quantize int8 if it has to be small"
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder and a decoder: only decoders are served"
    if getattr(model_class, "_is_stateful", False):
        return "keeps a recurrent state (state-space or hybrid layers), for which the slots have no place"
    odd_layers = set(getattr(text, "layer_types", None) or ()) - {FULL, SLIDING}
    if odd_layers:
        return f"has layers of {', '.join(sorted(odd_layers))}: the slots hold full and sliding attention only"
    if getattr(text, "num_kv_shared_layers", 0):
        return "shares keys and values between layers, which the slots do not"
    if DATA_DEPENDENT_ROPE in rope_types(text):
        return "has dynamic rotary positions, with which answers depend on the other requests of the batch"
    return None


def _reason_against_calls(calls: list[AttentionCall], text: PreTrainedConfig) -> str | None:
    if [call.layer for call in calls] != list(range(text.num_hidden_layers)):
        return "has layers that do not use transformers' attention interface (as with ALiBi): they cannot use the slots"
    if any(call.has_sinks for call in calls):
        return "has attention sinks, which are not supported"
    if not all(call.is_causal for call in calls):
        return "attends in both directions: only causal decoders are served"
    if any(call.key_size != call.value_size for call in calls) or len({_cells(call) for call in calls}) > 1:
        return "has keys and values of different sizes (as with multi-head latent attention): the slots have one size"
    layer_types = getattr(text, "layer_types", None) or ()
    if any(kind == SLIDING and calls[layer].window is None for layer, kind in enumerate(layer_types)):
        return "has sliding windows that it does not tell the attention interface about"
    return None


def _cells(call: AttentionCall) -> tuple[int, int]:
    return call.num_heads, call.key_size


def rope_types(text: PreTrainedConfig) -> set[str]:
    """The kinds of rotary positions, of all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", "default")) for entry in nested or [parameters]}
