"""torch_xla 2.9: the TPU, and XLA on the CPU where the same graphs are tested without one."""

import os
from collections.abc import Callable
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

    def to_device(self, host: Tensor) -> Tensor:
        """A transfer. (`torch.zeros(..., device=xla)` would compile a graph for each shape.)"""
        return host.to(self.device)

    def run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Trace, compile unless the graph is known, execute, and read the result.

        The barrier comes before the read: reading a pending tensor would execute a partial graph without donating
        the cache, and the barrier would then execute the work a second time.
        """
        with torch.no_grad():
            result = function(*arguments)
        torch_xla.sync()
        return result.cpu()

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
