"""Plain torch on the host's processor: nothing is compiled, and every step runs as it is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CpuRuntime:
    """Owns nothing: torch's own CPU device."""

    is_compiled = False
    device_type = "cpu"
    default_dtype = torch.float32
    device = torch.device("cpu")

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` right here."""
        function(0, *arguments)

    def to_device(self, host: Tensor) -> Tensor:
        """Already there."""
        return host

    def run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call it."""
        with torch.inference_mode():
            return function(*arguments)

    def num_compilations(self) -> int:
        """Plain torch compiles nothing."""
        return 0
