"""Weights travel from safetensors to the device one at a time, so that the host never holds two copies of them.

transformers lets a quantizer transform every parameter on its way from the file into the model, after it has renamed,
merged or split what the file holds. The one here puts the parameter on the device at that moment.

Files are read, not mapped: pages of a mapped file count as memory of the process for as long as one tensor of it lives.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "stream_to_device"


def open_weights(paths: Iterable[Path]) -> dict[str, Any]:
    """All tensors of some safetensors files by name, each of them read when it is indexed with `[...]`.

    Raises:
        OSError: one is not a file of safetensors.
    """
    tensors: dict[str, Any] = {}
    for path in paths:
        try:
            file = safe_open(path, framework="pt", backend="pread")
        except SafetensorError as error:
            raise OSError(f"{path} is not a file of safetensors: {error}") from error
        tensors |= {name: file.get_slice(name) for name in file.offset_keys()}  # type: ignore[no-untyped-call]
    return tensors


@register_quantization_config(METHOD)
@dataclass(kw_only=True)
class Stream(QuantizationConfigMixin):  # type: ignore[misc]
    """What is done with every parameter; the form in which transformers hands it to `StreamQuantizer`.

    Attributes:
        to_device: copies a tensor of the model to the device, by its name.
        prepare: changes the model's modules before they have weights.
        transform: from the name and value of a parameter to all that is stored for it, by name.
        misfits: what is wrong with the weights, a phrase each.
    """

    to_device: Callable[[PreTrainedModel, str, Tensor], Tensor]
    prepare: Callable[[PreTrainedModel], None] = lambda _: None
    transform: Callable[[PreTrainedModel, str, Tensor], dict[str, Tensor]] = lambda _, name, value: {name: value}
    misfits: list[str] = field(default_factory=list)
    quant_method: str = METHOD

    def place(self, model: PreTrainedModel, name: str, value: Tensor) -> dict[str, Tensor]:
        """What is stored for a parameter, on the device; nothing if its shape is wrong."""
        expected = model.get_parameter(name).shape
        if value.shape != expected:
            self.misfits.append(f"{name} is {list(value.shape)} and should be {list(expected)}")
            return {}
        stored = self.transform(model, name, value)
        return {name: self.to_device(model, name, tensor) for name, tensor in stored.items()}


@register_quantizer(METHOD)
class StreamQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers asks about each parameter. Where there is a quantizer, it reads them one by one."""

    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Every parameter passes through. Buffers are moved with the rest of the model."""
        return param_name not in dict(model.named_buffers())

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> None:
        self.quantization_config.prepare(model)

    def get_quantize_ops(self) -> ConversionOps:
        return _Place(self.quantization_config)


class _Place(ConversionOps):  # type: ignore[misc]
    """The last step of a conversion: the converted tensors go to the device."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def convert(self, input_dict: dict[str, Any], *, model: PreTrainedModel, **_: Any) -> dict[str, Tensor]:
        placed: dict[str, Tensor] = {}
        for name, values in input_dict.items():
            placed |= self._stream.place(model, name, values[0] if isinstance(values, list) else values)
        return placed
