"""From a model's config to the class of transformers, or of the model's own code, that runs it."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import _get_model_class

from tpu_tgi_server.model.files import needs_code

AUTO_CLASS = "AutoModelForCausalLM"


def load_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config, text and other parts.

    Raises:
        OSError: there is no config.json.
        ValueError: transformers does not know the architecture without code from the model's folder, or the config is
            wrong.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(needs_code(folder)) from error
        raise
    except OSError:
        raise
    except Exception as error:  # a field that is missing or wrong raises almost anything, in several lines
        raise ValueError(f"{folder / 'config.json'} is wrong: {' '.join(str(error).split())}") from error


def find_model_class(config: PreTrainedConfig, folder: Path, trust_remote_code: bool) -> tuple[Any, PreTrainedConfig]:
    """The class to load, and the part of the config that it takes.

    The rules of `AutoModelForCausalLM.from_pretrained`, which takes no tensors beside the name of a folder.

    Raises:
        ValueError: the model is none that continues text, or needs code that was not allowed.
    """
    reference = (getattr(config, "auto_map", None) or {}).get(AUTO_CLASS)
    if reference and trust_remote_code:
        return get_class_from_dynamic_module(reference, folder), config
    if type(config) not in AutoModelForCausalLM._model_mapping:
        if reference:
            raise ValueError(needs_code(folder))
        raise ValueError(f"{folder} is a {config.model_type} model, which does not continue text: it cannot be served")
    model_class = _get_model_class(config, AutoModelForCausalLM._model_mapping)
    is_text_part = model_class.config_class is config.sub_configs.get("text_config")
    return model_class, config.get_text_config() if is_text_part else config
