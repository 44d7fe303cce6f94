"""From settings to a generator that can serve: files, tokenizer, weights, cache, and the limits that follow."""

from collections.abc import Callable

from loguru import logger
from transformers import PreTrainedConfig

from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.tokenizer import load_tokenizer
from tpu_tgi_server.engine.types import Limits, ModelInfo, Pace
from tpu_tgi_server.model import loading
from tpu_tgi_server.model.architecture import load_config
from tpu_tgi_server.model.buckets import prefill_buckets, round_up_to_power_of_two
from tpu_tgi_server.model.cache import CacheSizes
from tpu_tgi_server.model.files import find_model_files
from tpu_tgi_server.model.probe import rope_types
from tpu_tgi_server.model.runner import ModelRunner, RunnerLimits
from tpu_tgi_server.runtime.interface import Runtime

DEFAULT_MAX_TOTAL_TOKENS = 2048
"""Also the default of TGI's routers."""

STAGES = ("files", "tokenizer", "weights", "cache")


def load_generator(
    settings: Settings, runtime: Runtime, on_stage: Callable[[str, int, int], None]
) -> tuple[Generator, ModelInfo]:
    """Load everything. `on_stage` is called as each of STAGES ends, with its name, its number, and how many there are,
    and before the first in the same way for each file that is fetched from the hub.

    Raises:
        OSError: files are missing or cannot be fetched.
        ValueError: the model or a setting does not fit; the message says which.
    """

    def done(stage: str) -> None:
        on_stage(stage, STAGES.index(stage) + 1, len(STAGES))

    files = find_model_files(settings, on_stage)
    config = load_config(files.folder, settings.trust_remote_code).get_text_config()
    limits = resolve_limits(settings, config)
    done("files")
    tokenizer = load_tokenizer(files.folder, settings.trust_remote_code)
    done("tokenizer")
    dtype = loading.DTYPES.get(settings.dtype, runtime.default_dtype)
    loaded = loading.load_weights(files, dtype, runtime, settings.trust_remote_code, settings.quantize)
    runtime.tune(loaded.module)
    done("weights")
    cache = loading.allocate_cache(loaded.layers, cache_sizes(settings, limits), dtype, runtime)
    steps = loading.make_steps(loaded.module, cache, settings.watermark_delta, runtime)
    model = ModelRunner(runtime, steps, runner_limits(settings.prefill_chunk_tokens, limits))
    done("cache")
    logger.info(
        "{} slots of {} tokens, prompts up to {} tokens, {} on {}",
        limits.num_slots,
        limits.max_total_tokens,
        limits.max_input_tokens,
        str(dtype).removeprefix("torch."),
        settings.device,
    )
    pace = Pace(settings.prefill_chunk_tokens, settings.decode_steps)
    info = ModelInfo(
        folder=str(files.folder.absolute()),
        dtype=str(dtype),
        device_type=runtime.device_type,
        limits=limits,
        sliding_window=getattr(config, "sliding_window", None),
    )
    return Generator(model, tokenizer, limits, settings.watermark_gamma, pace), info


def runner_limits(prefill_chunk_tokens: int, limits: Limits) -> RunnerLimits:
    """No row is longer than a chunk, nor than the longest prompt needs."""
    max_row_tokens = min(prefill_chunk_tokens, round_up_to_power_of_two(limits.max_input_tokens))
    return RunnerLimits(max_row_tokens, limits.max_input_tokens, limits.max_total_tokens)


def cache_sizes(settings: Settings, limits: Limits) -> CacheSizes:
    """What one step writes of a slot is the longest row of prompts, or the tokens of one Decode."""
    row_tokens = prefill_buckets(runner_limits(settings.prefill_chunk_tokens, limits).max_row_tokens)[-1]
    return CacheSizes(limits.num_slots, limits.max_total_tokens, max(row_tokens, settings.decode_steps))


def resolve_limits(settings: Settings, config: PreTrainedConfig) -> Limits:
    """The sizes to compile for: what the settings say, else 2048 tokens or what the model knows, if that is less.

    A longer prompt than that, without a total, leaves 2048 tokens for the answer.

    Raises:
        ValueError: the settings ask for more positions than the model has.
    """
    max_positions = max_exact_positions(config) or DEFAULT_MAX_TOTAL_TOKENS
    wanted = DEFAULT_MAX_TOTAL_TOKENS
    if settings.max_input_tokens is not None and settings.max_input_tokens >= wanted:
        wanted += settings.max_input_tokens
    max_total_tokens = settings.max_total_tokens or min(wanted, max_positions)
    if max_total_tokens > max_positions:
        raise ValueError(f"--max-total-tokens {max_total_tokens} is more than the model's {max_positions} positions")
    max_input_tokens = settings.max_input_tokens or max_total_tokens - 1
    if max_input_tokens >= max_total_tokens:
        raise ValueError(f"--max-input-tokens {max_input_tokens} leaves no room in {max_total_tokens} total tokens")
    return Limits(settings.max_batch_size, max_input_tokens, max_total_tokens)


def max_exact_positions(config: PreTrainedConfig) -> int | None:
    """How long a sequence may be; None if the model does not say.

    longrope has other rotary positions for sequences beyond the original length, and transformers chooses by the
    longest sequence of the batch: beyond, an answer would depend on its neighbours.
    """
    max_positions: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if "longrope" in rope_types(config):
        return int(rope.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    return max_positions
