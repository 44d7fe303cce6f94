"""A model from its config.json alone: every weight has its shape, dtype and place, and no value."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tpu_tgi_server.model import attention
from tpu_tgi_server.model.architecture import load_config
from tpu_tgi_server.runtime.interface import Runtime


def hollow_model(
    folder: Path, dtype: torch.dtype, runtime: Runtime, trust_remote_code: bool = False
) -> PreTrainedModel:
    """What `load_weights` returns, without the weights: their pages are never touched, so they take no memory.

    Raises:
        OSError: there is no config.json.
        ValueError: transformers does not know the architecture.
    """
    attention.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            load_config(folder, trust_remote_code),
            dtype=dtype,
            attn_implementation=attention.ATTENTION_NAME,
            trust_remote_code=trust_remote_code,
        )
    model = model.eval().requires_grad_(False).to_empty(device="cpu")
    model._apply(runtime.to_device)  # `to` would read the pages
    model.tie_weights()
    result: PreTrainedModel = model
    return result
