"""Plain torch on the host's processor: nothing is compiled, and every step runs as it is written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpu_tgi_server.runtime.cpu_linear import speed_up_linear
from tpu_tgi_server.runtime.interface import StepResultT


def free_host_bytes() -> int:
    """Memory that a program can still get, caches of files included."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


class CpuRuntime:
    """Owns nothing: torch's own CPU device."""

    is_compiled = False
    device_type = "cpu"
    default_dtype = torch.float32
    device = torch.device("cpu")
    num_cores = 1

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` right here."""
        function(0, *arguments)

    def free_memory_bytes(self) -> int:
        """The host's free memory."""
        return free_host_bytes()

    def tune(self, model: torch.nn.Module) -> None:
        """Replace linear layers, see `cpu_linear`."""
        speed_up_linear(model)

    def to_device(self, host: Tensor, split_axis: int | None = None) -> Tensor:  # noqa: ARG002 - there is one core
        """Already there."""
        return host

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, split_axis: int | None = None) -> Tensor:  # noqa: ARG002
        """In the host's memory."""
        return torch.zeros(*shape, dtype=dtype)

    def gather(self, device: Tensor) -> None:
        """Already there."""

    def to_host(self, device: Tensor) -> Tensor:
        """Already there."""
        return device

    def prepare(
        self,
        step: Callable[..., StepResultT],
        in_place: Sequence[Tensor],  # noqa: ARG002 - plain torch writes in place anyway
    ) -> Callable[..., StepResultT]:
        """The step without autograd; a call returns when it is done."""

        def call(*arguments: Any) -> StepResultT:
            with torch.inference_mode():
                return step(*arguments)

        return call

    def num_compilations(self) -> int:
        """Plain torch compiles nothing."""
        return 0
