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
from tpu_tgi_server.runtime.xla_replay import ReplayedStep


class XlaRuntime:
    """Owns the process's choice of PJRT device.

    Importing this module touches no device; `device` does, so it may only be used inside `launch`.
    """

    is_compiled = True
    device_type = "xla"

    def __init__(self, pjrt_device: str, compilation_cache: Path | None = None) -> None:
        os.environ["PJRT_DEVICE"] = pjrt_device
        if compilation_cache is not None:
            use_compilation_cache(compilation_cache)
        self._is_tpu = pjrt_device == "TPU"
        self.default_dtype = torch.bfloat16 if pjrt_device == "TPU" else torch.float32

    @property
    def device(self) -> torch.device:
        device: torch.device = torch_xla.device()
        return device

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` in this process, pinned to one chip.

        With nprocs=1 `xmp.spawn` starts no process: it sets the one-chip topology and calls.
        """
        xmp.spawn(function, args=arguments, nprocs=1)

    def free_memory_bytes(self) -> int | None:
        """What the chip reports; XLA's CPU client reports nothing."""
        if not self._is_tpu:
            return None
        memory = xm.get_memory_info()
        return int(memory["bytes_limit"]) - int(memory["bytes_used"])

    def tune(self, model: torch.nn.Module) -> None:
        """Nothing to do: XLA lays weights out itself."""

    def to_device(self, host: Tensor) -> Tensor:
        """A transfer. (`torch.zeros(..., device=xla)` would compile a graph for each shape.)"""
        return host.to(self.device)

    def to_host(self, device: Tensor) -> Tensor:
        """Wait for the device, and transfer."""
        return device.cpu()

    def prepare(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor]) -> Callable[..., StepResultT]:
        """See `ReplayedStep`."""
        return ReplayedStep(step, in_place)

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
