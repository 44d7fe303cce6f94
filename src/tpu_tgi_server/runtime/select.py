"""Turns the device setting into a runtime. torch_xla is imported only when it is asked for."""

import os
from collections.abc import Mapping
from pathlib import Path

from tpu_tgi_server.config import Device, Parallel
from tpu_tgi_server.runtime.cpu import CpuRuntime
from tpu_tgi_server.runtime.interface import Runtime


def select_runtime(
    device: Device, compilation_cache: Path | None = None, parallel: Parallel = Parallel.AUTO
) -> Runtime:
    """The runtime for a device that is not `auto` any more.

    Args:
        device: where the model runs.
        compilation_cache: where compiled graphs are kept; None for the default of the device.
        parallel: `tensor` for all cores of the host together, anything else for one core.

    Raises:
        ValueError: torch_xla is needed and not installed, or `device` is still `auto`.
    """
    if device is Device.CPU:
        os.environ["USE_TORCH_XLA"] = "0"  # or transformers imports torch_xla wherever it is installed
        return CpuRuntime()
    if device is Device.AUTO:
        raise ValueError("resolve the device first")
    try:
        from tpu_tgi_server.runtime.xla import XlaRuntime
    except ImportError as error:
        raise ValueError(f"--device {device} needs torch_xla 2.9, which is not usable here: {error}") from error
    has_all_cores = parallel is Parallel.TENSOR
    if device is Device.TPU:
        return XlaRuntime("TPU", compilation_cache or default_compilation_cache(os.environ), has_all_cores)
    return XlaRuntime("CPU", compilation_cache, has_all_cores)


def default_compilation_cache(environment: Mapping[str, str]) -> Path:
    """In the user's folder for caches, by the XDG specification, which ignores a relative path."""
    folder = Path(environment.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "tpu-tgi-server"
