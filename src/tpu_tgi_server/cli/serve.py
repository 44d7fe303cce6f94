"""The command that serves a model, for TGI's launcher and for people."""

import asyncio
import os
import sys

from loguru import logger

from tpu_tgi_server.cli import options
from tpu_tgi_server.config import ONE_PROCESS, Device, Settings, resolve_device, settings_from, tidy_environment
from tpu_tgi_server.logs import STDOUT, configure_logging

USAGE_ERROR = 2


def serve(
    model: options.ModelId = None,
    model_id: options.ModelIdOption = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = None,
    huggingface_hub_cache: options.HubCache = None,
    weights_cache_override: options.WeightsOverride = None,
    uds_path: options.UdsPath = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    parallel: options.ParallelOption = None,
    max_batch_size: options.MaxBatchSize = None,
    max_total_tokens: options.MaxTotalTokens = None,
    max_input_tokens: options.MaxInputTokens = None,
    prefill_chunk_tokens: options.PrefillChunkTokens = None,
    decode_steps: options.DecodeSteps = None,
    step_ahead: options.StepAhead = None,
    skip_warmup: options.SkipWarmup = None,
    compilation_cache: options.CompilationCache = None,
    step_timeout: options.StepTimeout = None,
    load_timeout: options.LoadTimeout = None,
    watermark_gamma: options.WatermarkGamma = None,
    watermark_delta: options.WatermarkDelta = None,
    logger_level: options.LoggerLevel = None,
    json_output: options.JsonOutput = None,
    sharded: options.Sharded = False,
    quantize: options.Quantize = None,
    speculate: options.Speculate = 0,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    otlp_endpoint: options.OtlpEndpoint = None,
    otlp_service_name: options.OtlpServiceName = None,  # noqa: ARG001 - the launcher always gives it
) -> None:
    """Serve a model to text-generation-inference's router over gRPC on a unix socket."""
    try:
        refuse_launcher_options(sharded, quantize, speculate, kv_cache_dtype)
        settings = settings_from(
            os.environ,
            model_id=one_model(model, model_id),
            revision=revision,
            trust_remote_code=trust_remote_code,
            huggingface_hub_cache=huggingface_hub_cache,
            weights_cache_override=weights_cache_override,
            uds_path=uds_path,
            device=resolve_device(device or Device.AUTO, os.environ),
            dtype=dtype,
            parallel=parallel,
            max_batch_size=max_batch_size,
            max_total_tokens=max_total_tokens,
            max_input_tokens=max_input_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            decode_steps=decode_steps,
            step_ahead=step_ahead,
            skip_warmup=skip_warmup,
            compilation_cache=compilation_cache,
            step_timeout_s=step_timeout,
            load_timeout_s=load_timeout,
            watermark_gamma=watermark_gamma,
            watermark_delta=watermark_delta,
            logger_level=logger_level,
            json_output=json_output,
        )
        configure_logging(settings.logger_level, settings.json_output)
    except ValueError as error:
        options.fail(str(error), USAGE_ERROR)
    tidy_environment(os.environ)
    if otlp_endpoint:
        logger.warning("--otlp-endpoint is ignored: the server sends no traces")
    sys.exit(run_server(settings))


def one_model(argument: str | None, option: str | None) -> str:
    """The model that was given, as an argument or as --model-id.

    Raises:
        ValueError: none was given, or two.
    """
    if bool(argument) == bool(option):
        raise ValueError("give one model: a folder, or the name of a model on the hub")
    return argument or option or ""


def refuse_launcher_options(sharded: bool, quantize: str | None, speculate: int, kv_cache_dtype: str) -> None:
    """Refuse options of TGI's launcher that would change how the model runs, and do not here.

    Raises:
        ValueError: one of them was given; the message says what to do.
    """
    if sharded:
        raise ValueError(ONE_PROCESS)
    if quantize:
        raise ValueError(
            f"--quantize {quantize} is not supported: leave it out, or, if it comes from the model's config.json, "
            "choose a model that is not quantized"
        )
    if speculate:
        raise ValueError(f"--speculate {speculate} is not supported: leave it out")
    if kv_cache_dtype != "auto":
        raise ValueError(f"--kv-cache-dtype {kv_cache_dtype} is not supported: leave it out")


def run_server(settings: Settings) -> int:
    """Serve until told to stop; the exit status."""
    from tpu_tgi_server.progress import progress_display
    from tpu_tgi_server.service.lifecycle import serve as serve_until_stopped

    is_terminal = os.isatty(STDOUT) and not settings.json_output
    try:
        return asyncio.run(serve_until_stopped(settings, progress_display(is_terminal)))
    except (OSError, ValueError) as error:
        logger.error("{}", error)
        return 1
