"""torch_xla 2.9: the TPU, and XLA on the CPU where the same graphs are tested without one."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from loguru import logger
from torch import Tensor

from tpu_tgi_server.runtime.interface import StepResultT
from tpu_tgi_server.runtime.xla_mesh import CoreMesh
from tpu_tgi_server.runtime.xla_replay import ReplayedStep


class XlaRuntime:
    """Owns the process's choice of PJRT device, one core of it or all.

    Importing this module touches no device; `device` does, so it may only be used inside `launch`.
    """

    is_compiled = True
    device_type = "xla"

    def __init__(self, pjrt_device: str, compilation_cache: Path | None = None, has_all_cores: bool = False) -> None:
        os.environ["PJRT_DEVICE"] = pjrt_device
        if compilation_cache is not None:
            use_compilation_cache(compilation_cache)
        self._is_tpu = pjrt_device == "TPU"
        self._has_all_cores = has_all_cores
        self._mesh: CoreMesh | None = None
        self.default_dtype = torch.bfloat16 if pjrt_device == "TPU" else torch.float32

    @property
    def device(self) -> torch.device:
        device: torch.device = torch_xla.device()
        return device

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` in this process, with all cores or pinned to one chip.

        With nprocs=1 `xmp.spawn` starts no process: it sets the one-chip topology and calls.
        """
        if not self._has_all_cores:
            xmp.spawn(function, args=arguments, nprocs=1)
            return
        xr.use_spmd()  # before the first tensor
        self._mesh = CoreMesh(xr.global_runtime_device_count())
        function(0, *arguments)

    def free_memory_bytes(self) -> int | None:
        """What the chip reports; XLA's CPU client reports nothing, nor does torch_xla 2.9 for all cores together."""
        if not self._is_tpu or self._has_all_cores:
            return None
        memory = xm.get_memory_info()
        return int(memory["bytes_limit"]) - int(memory["bytes_used"])

    def tune(self, model: torch.nn.Module) -> None:
        """Nothing to do: XLA lays weights out itself."""

    @property
    def num_cores(self) -> int:
        return 1 if self._mesh is None else self._mesh.num_cores

    def to_device(self, host: Tensor, split_axis: int | None = None) -> Tensor:
        """A transfer."""
        tensor = host.to(self.device)
        if self._mesh is not None:
            self._mesh.mark(tensor, split_axis)  # nothing has travelled so far; now each core gets its part
        return tensor

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, split_axis: int | None = None) -> Tensor:
        """A transfer. (`torch.zeros(..., device=xla)` would compile a graph for each shape.)"""
        return self.to_device(torch.zeros(*shape, dtype=dtype), split_axis)

    def gather(self, device: Tensor) -> None:
        """A note in the graph."""
        if self._mesh is not None:
            self._mesh.mark(device, None)

    def to_host(self, device: Tensor) -> Tensor:
        """Wait for the device, and transfer."""
        return device.cpu()

    def prepare(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor]) -> Callable[..., StepResultT]:
        """See `ReplayedStep`."""
        return ReplayedStep(step, in_place, on_result=self.gather)

    def num_compilations(self) -> int:
        """The counter of torch_xla's own metrics."""
        data = metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled graphs in a folder. One that cannot be used is no reason not to serve."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass  # torch_xla only finds out when it has compiled something
    except OSError as error:
        logger.warning("compiled graphs are not kept: {}", error)
        return
    xr.initialize_cache(str(folder))
