"""From a model's files to weights on the device: reading them, allocating the cache."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tpu_tgi_server.config import Dtype, Quantize
from tpu_tgi_server.model import attention, experts, int8
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.cache import StaticCacheXla, heads_a_row
from tpu_tgi_server.model.files import ModelFiles, weight_paths
from tpu_tgi_server.model.probe import reason_against
from tpu_tgi_server.model.sharding import WeightPlacer, bytes_a_core, share_out
from tpu_tgi_server.model.steps import DeviceSteps
from tpu_tgi_server.model.streaming import Stream, open_weights
from tpu_tgi_server.runtime.host_memory import freed_blocks_are_returned
from tpu_tgi_server.runtime.interface import Runtime

HEADS_AXIS = 1
"""Of a layer's keys and values, [B, K, S, D]."""

DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


def load_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    runtime: Runtime,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> PreTrainedModel:
    """The model in evaluation mode on the runtime's device, with attention over the slot cache.

    The host holds one tensor at a time beside what is on the device.

    Raises:
        ValueError: the model cannot be served right; the message says why.
        OSError: weights are missing or have another shape than the config says.
    """
    disable_progress_bar()  # it would write to stderr; loading reports its own stages
    placer = WeightPlacer(runtime)
    stream = Stream(to_device=placer.place)
    if quantize is Quantize.INT8:
        stream = replace(stream, prepare=int8.replace_linears, transform=int8.quantize_parameter)
    model_class, config = find_servable_class(files.folder, trust_remote_code)
    with freed_blocks_are_returned():
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=open_weights(weight_paths(files.weights_folder)),
            quantization_config=stream,
            output_loading_info=True,
            dtype=dtype,
            **implementations(runtime),
            generation_config=GenerationConfig(),  # the engine generates; or a file of it is looked for
        )
    model.hf_quantizer.remove_quantization_config(model)
    missing = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    if problems := stream.misfits or missing:
        raise OSError(f"{files.weights_folder} does not hold the weights of this model: {few(problems)}")
    model = model.eval().requires_grad_(False)
    share_out(model, placer)
    hold_longrope(model)
    return model


def find_servable_class(folder: Path, trust_remote_code: bool) -> tuple[Any, PreTrainedConfig]:
    """The class that runs a model, and its config.

    Raises:
        ValueError: the model cannot be served right; the message says why.
        OSError: there is no config.json.
    """
    model_class, config = find_model_class(load_config(folder, trust_remote_code), folder, trust_remote_code)
    reason = reason_against(model_class, config)
    if reason is not None:
        raise ValueError(f"{folder} is a {config.model_type} model and {reason}")
    return model_class, config


def implementations(runtime: Runtime) -> dict[str, str]:
    """What transformers is told to use instead of its own attention and experts."""
    attention.register()
    experts.register()
    return {
        "attn_implementation": attention.ATTENTION_NAME,
        "experts_implementation": experts.EXPERTS_NAME if runtime.is_compiled else "eager",
    }


def hold_longrope(model: PreTrainedModel) -> None:
    """Keep the frequencies of short sequences, which are the ones within the length that the server allows.

    transformers would choose between the two sets in every step, for all sequences by the longest of them.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "default"


def few(items: Sequence[str], num_named: int = 3) -> str:
    """The first of many items, and how many there are more."""
    return ", ".join(items[:num_named]) + (f" and {len(items) - num_named} more" if len(items) > num_named else "")


def allocate_cache(
    config: PreTrainedConfig, num_slots: int, max_total_tokens: int, dtype: torch.dtype, runtime: Runtime
) -> StaticCacheXla:
    """A cache of zeros on the device, where each core has its part of the key/value heads.

    Raises:
        ValueError: it does not fit; the message says what would.
    """
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot_shape = (2 * config.num_hidden_layers, num_heads, max_total_tokens, head_size)
    bytes_a_slot = bytes_a_core(slot_shape, dtype.itemsize, HEADS_AXIS, runtime.num_cores)
    check_cache_fits(num_slots, bytes_a_slot, runtime.free_memory_bytes())
    if runtime.num_cores > 1:
        logger.info("{:.1f} MB of KV cache on each of {} cores", num_slots * bytes_a_slot / 1e6, runtime.num_cores)
    is_one_core = runtime.is_compiled and runtime.num_cores == 1  # several share the heads, so each has its own row
    num_side_by_side = heads_a_row(num_heads, head_size) if is_one_core else 1
    shape = (num_slots, num_heads // num_side_by_side, max_total_tokens, num_side_by_side * head_size)

    def layers() -> list[torch.Tensor]:
        zeros = (torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers))
        return [runtime.to_device(layer, HEADS_AXIS) for layer in zeros]

    return StaticCacheXla(keys=layers(), values=layers())


def check_cache_fits(num_slots: int, bytes_a_slot: int, free_bytes: int | None) -> None:
    """Refuse a cache that the device cannot hold before it is allocated.

    Raises:
        ValueError: what was asked, what there is, and the flags to change.
    """
    if free_bytes is None or num_slots * bytes_a_slot <= free_bytes:
        return
    wanted_gb, free_gb = num_slots * bytes_a_slot / 1e9, free_bytes / 1e9
    raise ValueError(
        f"the KV cache of {num_slots} slots takes {wanted_gb:.1f} GB, and {free_gb:.1f} GB are free beside weights: "
        f"lower --max-batch-size to {free_bytes // bytes_a_slot}, or --max-total-tokens"
    )


def make_steps(model: PreTrainedModel, cache: StaticCacheXla, watermark_delta: float, runtime: Runtime) -> DeviceSteps:
    """The device's part of every step."""
    num_slots = cache.keys[0].shape[0]
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return DeviceSteps(
        model,
        cache,
        counts=runtime.to_device(torch.zeros(num_slots, vocab_size, dtype=torch.int32)),
        slots=runtime.to_device(torch.arange(num_slots, dtype=torch.int32)),
        watermark_delta=watermark_delta,
    )
