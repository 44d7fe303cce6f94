"""What the rest of the package needs of an accelerator stack. Another stack is one more file beside `cpu` and `xla`."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

StepResultT = TypeVar("StepResultT")


class Runtime(Protocol):
    """One device of one process, once it is entered.

    The device may have several cores. Then a tensor is spread over them along one of its axes, or each of them has all
    of it. Steps are written as if there were one core, and the result is the same.
    """

    @property
    def device_type(self) -> str:
        """What Info reports: `cpu` or `xla`."""
        ...

    @property
    def is_compiled(self) -> bool:
        """Whether every shape and every branch is a graph of its own that has to be compiled."""
        ...

    @property
    def default_dtype(self) -> torch.dtype:
        """What `--dtype auto` means here."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def num_cores(self) -> int:
        """Over how many cores a tensor can be spread."""
        ...

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function(rank, *arguments)` in the place where the device may be used, and wait for its end."""
        ...

    def free_memory_bytes(self) -> int | None:
        """How much each core can still hold; None if it is not known."""
        ...

    def tune(self, model: torch.nn.Module) -> None:
        """Make a loaded model faster here, in place, without changing what it computes."""
        ...

    def to_device(self, host: Tensor, split_axis: int | None = None) -> Tensor:
        """Copy to the device without compiling anything.

        Args:
            host: a tensor of any shape.
            split_axis: the axis along which each core gets its part; None if each core gets everything. The parts of
                the last cores are padded, where the size does not divide, and no step sees the padding.
        """
        ...

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, split_axis: int | None = None) -> Tensor:
        """As `to_device` with zeros, which may be more than the host holds where they take no memory."""
        ...

    def gather(self, device: Tensor) -> None:
        """In a step: let every core have all of a tensor from here on."""
        ...

    def to_host(self, device: Tensor) -> Tensor:
        """Wait for a tensor, and copy it to the host."""
        ...

    def prepare(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor]) -> Callable[..., StepResultT]:
        """A step in the form in which it is to be called: where graphs are compiled, one for all that is not a tensor.

        A call starts the step, after those started before, and need not wait for it: its results stay on the device,
        where every core has all of them.

        Args:
            step: a function of tensors and constants that returns one or several tensors, written as plain torch.
            in_place: the tensors on the device that it writes, besides its arguments. They are never copied.
        """
        ...

    def num_compilations(self) -> int:
        """How many graphs this process has compiled so far."""
        ...
