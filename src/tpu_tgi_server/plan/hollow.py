"""A model from its config.json alone: every weight has its shape, dtype and place, and no value."""

from pathlib import Path

import torch

from tpu_tgi_server.config import Quantize
from tpu_tgi_server.model import int8
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.loading import LoadedModel, hold_longrope, implementations
from tpu_tgi_server.model.probe import layers_to_serve
from tpu_tgi_server.model.sharding import WeightPlacer, share_out
from tpu_tgi_server.runtime.tracing import TracingRuntime


def hollow_model(
    folder: Path,
    dtype: torch.dtype,
    runtime: TracingRuntime,
    trust_remote_code: bool = False,
    quantize: Quantize | None = None,
) -> LoadedModel:
    """What `load_weights` returns, without the weights.

    Raises:
        OSError: there is no config.json.
        ValueError: the model cannot be served right; the message says why.
    """
    model_class, config = find_model_class(load_config(folder, trust_remote_code), folder, trust_remote_code)
    layers = layers_to_serve(model_class, config, folder)
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=dtype, **implementations(runtime))
        if quantize is Quantize.INT8:
            int8.replace_linears(model)
    model = model.eval().requires_grad_(False)
    placer = WeightPlacer(runtime)
    for name, weight in list(model.named_parameters()):
        module_name, _, leaf = name.rpartition(".")
        placed = torch.nn.Parameter(placer.place(model, name, weight), requires_grad=False)
        setattr(model.get_submodule(module_name), leaf, placed)
    share_out(model, placer)
    hold_longrope(model)
    return LoadedModel(model, layers)
