"""The command that fetches a model from the hub, or checks that a folder has one."""

import os

from loguru import logger

from tpu_tgi_server.cli import options
from tpu_tgi_server.cli.serve import USAGE_ERROR, one_model
from tpu_tgi_server.config import settings_from, tidy_environment
from tpu_tgi_server.logs import STDOUT, configure_logging

SAFETENSORS = ".safetensors"


def download_weights(
    model: options.ModelId = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = None,
    huggingface_hub_cache: options.HubCache = None,
    weights_cache_override: options.WeightsOverride = None,
    logger_level: options.LoggerLevel = None,
    json_output: options.JsonOutput = None,
    extension: options.Extension = SAFETENSORS,
    merge_lora: options.MergeLora = False,  # noqa: ARG001 - adapters are refused with it and without it
) -> None:
    """Fetch what serving a model needs from the hub. A folder is only checked, and never written to."""
    try:
        settings = settings_from(
            os.environ,
            model_id=one_model(model, None),
            revision=revision,
            trust_remote_code=trust_remote_code,
            huggingface_hub_cache=huggingface_hub_cache,
            weights_cache_override=weights_cache_override,
            logger_level=logger_level,
            json_output=json_output,
        )
        configure_logging(settings.logger_level, settings.json_output)
        if extension != SAFETENSORS:
            raise ValueError(f"--extension {extension} is not supported: weights must be {SAFETENSORS}")
    except ValueError as error:
        options.fail(str(error), USAGE_ERROR)
    tidy_environment(os.environ)

    from tpu_tgi_server.mailbox.messages import Progress
    from tpu_tgi_server.model.files import find_model_files
    from tpu_tgi_server.progress import progress_display

    display = progress_display(os.isatty(STDOUT) and not settings.json_output)
    try:
        files = find_model_files(
            settings, lambda name, done, total: display(Progress("downloading", name, done, total))
        )
    except (OSError, ValueError) as error:
        options.fail(str(error), 1)
    logger.info("{} is complete in {}", settings.model_id, files.folder)
