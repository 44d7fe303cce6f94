"""XLA without a device: it writes down what it would compile, for one core or several, and computes nothing.

Tensors are placeholders: they have a shape, and a place on the cores, but no values and no memory.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.runtime as xr
from torch import Tensor

from tpu_tgi_server.runtime.interface import StepResultT
from tpu_tgi_server.runtime.lazy_graph import lazy_graph
from tpu_tgi_server.runtime.xla_mesh import CoreMesh


@dataclass(frozen=True)
class LoweredStep:
    """A step as XLA takes it from torch_xla, and what torch_xla tells XLA beside it.

    Attributes:
        module: a serialised HloModuleProto.
        donors: numbers of the parameters whose buffers it may overwrite.
        parameter_axes: for each parameter the axis along which it is spread over the cores; None where each core has
            all of it.
        result_axes: the same for each result.
    """

    module: bytes
    donors: list[int]
    parameter_axes: list[int | None]
    result_axes: list[int | None]


class TracingRuntime:
    """Owns the axes of the placeholders. Make one before anything touches a device of torch_xla.

    Attributes:
        lowered: the step that was called last.
    """

    is_compiled = True
    device_type = "xla"
    default_dtype = torch.bfloat16
    lowered: LoweredStep

    def __init__(self, num_cores: int = 1) -> None:
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_cores)}
        self.num_cores = num_cores
        self._mesh: CoreMesh | None = None
        self._axes: dict[int, int | None] = {}
        if num_cores > 1:
            xr.use_spmd()
            self._mesh = CoreMesh(num_cores)

    @property
    def device(self) -> torch.device:
        device: torch.device = torch_xla.device()
        return device

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` right here."""
        function(0, *arguments)

    def free_memory_bytes(self) -> None:
        """Unknown: what fits is for the TPU's compiler to say."""

    def tune(self, model: torch.nn.Module) -> None:
        """Nothing to do, as on a TPU."""

    def to_device(self, host: Tensor, split_axis: int | None = None) -> Tensor:
        """A placeholder; of the host's tensor, which may be one on "meta", only shape and dtype matter."""
        placeholder: Tensor = xb.create_placeholder_tensor(host.shape, host.dtype)
        (handle,) = torch_xla._XLAC._get_tensors_handle([placeholder])
        self._axes[handle] = None if split_axis is None else split_axis % host.dim()
        return placeholder

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, split_axis: int | None = None) -> Tensor:
        """A placeholder, of any size: a plan may be one of what does not fit."""
        return self.to_device(torch.empty(*shape, dtype=dtype, device="meta"), split_axis)

    def split_axis(self, placeholder: Tensor) -> int | None:
        """What `to_device` was told of it."""
        (handle,) = torch_xla._XLAC._get_tensors_handle([placeholder])
        return self._axes[handle]

    def gather(self, device: Tensor) -> None:
        """A note in the graph."""
        if self._mesh is not None:
            self._mesh.mark(device, None)

    def to_host(self, device: Tensor) -> Tensor:
        """Zeros are on the host already."""
        return device

    def prepare(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor]) -> Callable[..., StepResultT]:
        """A step that, when it is called, is written down in `lowered` and returns zeros."""

        def call(*arguments: Any) -> StepResultT:
            shapes = self._lower(step, arguments, in_place)
            zeros = tuple(torch.zeros(shape) for shape in shapes)
            result: StepResultT = zeros if len(zeros) > 1 else zeros[0]  # type: ignore[assignment]
            return result

        return call

    def num_compilations(self) -> int:
        """Nothing is ever compiled."""
        return 0

    def _lower(self, step: Callable[..., Any], arguments: Sequence[Any], in_place: Sequence[Tensor]) -> list[list[int]]:
        """Write one step down; the shapes of its results."""
        num_arguments = sum(isinstance(argument, Tensor) for argument in arguments)
        with lazy_graph(step, arguments, in_place, self.gather) as graph:
            sources = enumerate(graph.sources)
            donors = [number for number, source in sources if source is not None and source >= num_arguments]
            axes = [self._axes.get(handle) for handle in graph.handles]
            context = torch_xla._XLAC.lowering.LoweringContext("step")
            context.build(graph.outputs)
            self.lowered = LoweredStep(
                module=context.hlo(),
                donors=donors,
                parameter_axes=axes,
                result_axes=[*[None] * len(graph.results), *[axes[donor] for donor in donors]],
            )
            return [list(tensor.shape) for tensor in graph.results]
