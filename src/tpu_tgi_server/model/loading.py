"""From a model's files to weights on the device: reading them, allocating the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from loguru import logger
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tpu_tgi_server.config import Dtype, Quantize
from tpu_tgi_server.model import attention, experts, int8
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.cache import CacheSizes, StaticCacheXla
from tpu_tgi_server.model.files import ModelFiles, weight_paths
from tpu_tgi_server.model.head_rows import HeadRows, head_rows
from tpu_tgi_server.model.probe import AttentionCall, layers_to_serve
from tpu_tgi_server.model.ring import ring_len
from tpu_tgi_server.model.sharding import WeightPlacer, bytes_a_core, share_out
from tpu_tgi_server.model.steps import DeviceSteps
from tpu_tgi_server.model.streaming import Stream, open_weights
from tpu_tgi_server.runtime.host_memory import freed_blocks_are_returned
from tpu_tgi_server.runtime.interface import Runtime

HEADS_AXIS = 1
"""Of a layer's keys and values, [B, K, R, D]."""

DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model whose attention goes over the slot cache.

    Attributes:
        module: in evaluation mode, on the runtime's device.
        layers: what each of its layers asks of the cache.
    """

    module: PreTrainedModel
    layers: list[AttentionCall]


def load_weights(
    files: ModelFiles,
    dtype: torch.dtype,
    runtime: Runtime,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> LoadedModel:
    """The model with its weights from the files.

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
    config = load_config(files.folder, trust_remote_code)
    model_class, config = find_model_class(config, files.folder, trust_remote_code)
    layers = layers_to_serve(model_class, config, files.folder)
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
    return LoadedModel(model, layers)


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
    layers: Sequence[AttentionCall], sizes: CacheSizes, dtype: torch.dtype, runtime: Runtime
) -> StaticCacheXla:
    """A cache of zeros on the device, where each core has its part of the key/value heads.

    Raises:
        ValueError: it does not fit; the message says what would.
    """
    num_heads, head_size = layers[0].num_heads, layers[0].key_size
    ring_lens = [ring_len(layer.window, sizes.max_step_tokens, sizes.max_slot_len) for layer in layers]
    rows = HeadRows(num_heads, head_size)
    if runtime.is_compiled:
        rows = head_rows(num_heads, head_size, runtime.num_cores)
    slot_shape = (2, rows.num_rows, sum(ring_lens), rows.row_size)
    bytes_a_slot = bytes_a_core(slot_shape, dtype.itemsize, HEADS_AXIS, runtime.num_cores)
    check_cache_fits(sizes.num_slots, bytes_a_slot, runtime.free_memory_bytes())
    log_cache(ring_lens, sizes, bytes_a_slot, runtime.num_cores)

    def zeros() -> list[torch.Tensor]:
        shapes = ((sizes.num_slots, rows.num_rows, length, rows.row_size) for length in ring_lens)
        return [runtime.zeros(shape, dtype, HEADS_AXIS) for shape in shapes]

    return StaticCacheXla(zeros(), zeros(), sizes.max_slot_len)


def log_cache(ring_lens: Sequence[int], sizes: CacheSizes, bytes_a_slot: int, num_cores: int) -> None:
    """Say how large the cache is, and which layers need less than others."""
    of_cores = f" on each of {num_cores} cores" if num_cores > 1 else ""
    logger.info("{:.1f} MB of KV cache{}", sizes.num_slots * bytes_a_slot / 1e6, of_cores)
    shorter = [length for length in ring_lens if length < sizes.max_slot_len]
    if shorter:
        logger.info("{} of {} layers keep no more than {} tokens", len(shorter), len(ring_lens), max(shorter))


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
        counts=runtime.zeros((num_slots, vocab_size), torch.int32),
        slots=runtime.to_device(torch.arange(num_slots, dtype=torch.int32)),
        watermark_delta=watermark_delta,
    )
