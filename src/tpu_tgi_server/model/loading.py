"""From a model's files to weights on the device: reading them, allocating the cache."""

from pathlib import Path

import torch
from loguru import logger
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tpu_tgi_server.config import Dtype
from tpu_tgi_server.model import attention
from tpu_tgi_server.model.cache import StaticCacheXla
from tpu_tgi_server.model.files import ModelFiles, needs_code
from tpu_tgi_server.model.sharding import bytes_a_core, place_model
from tpu_tgi_server.model.steps import DeviceSteps
from tpu_tgi_server.runtime.interface import Runtime

HEADS_AXIS = 1
"""Of a layer's keys and values, [B, K, S, D]."""

DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


def load_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The text part of the model's config.

    Raises:
        OSError: there is no config.json.
        ValueError: transformers does not know the architecture without code from the model's folder.
    """
    return _load_whole_config(folder, trust_remote_code).get_text_config()


def _load_whole_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(needs_code(folder)) from error
        raise


def load_weights(
    files: ModelFiles, dtype: torch.dtype, runtime: Runtime, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model in evaluation mode on the runtime's device, with attention over the slot cache.

    Raises:
        OSError: weights are missing from the folder.
    """
    attention.register()
    disable_progress_bar()  # it would write to stderr; loading reports its own stages
    model = AutoModelForCausalLM.from_pretrained(
        files.weights_folder,
        config=_load_whole_config(files.folder, trust_remote_code),
        dtype=dtype,
        attn_implementation=attention.ATTENTION_NAME,
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        generation_config=GenerationConfig(),  # the engine generates; or a file of it is looked for beside the weights
    )
    model = model.eval().requires_grad_(False)
    place_model(model, runtime)
    return model


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
    zeros = torch.zeros(num_slots, num_heads, max_total_tokens, head_size, dtype=dtype)

    def layers() -> list[torch.Tensor]:
        return [runtime.to_device(zeros.clone(), HEADS_AXIS) for _ in range(config.num_hidden_layers)]

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
