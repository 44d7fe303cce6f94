"""Steps that are traced once and replayed from then on.

Without this, torch_xla traces a step anew each time, which takes longer than a TPU needs to run it.
`torch.compile(backend="openxla")` replays too, but takes seconds a graph for its own tracing: here two layers took 4 s,
of which XLA's compilation was less than 1 s. So this hands the step straight to the function that the backend ends in.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic

import torch
from torch import Tensor
from torch_xla._dynamo.dynamo_bridge import extract_internal

from tpu_tgi_server.runtime.interface import StepResultT


class ReplayedStep(Generic[StepResultT]):
    """Owns the graphs of one step: one for each combination of shapes and constants among its arguments."""

    def __init__(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor]) -> None:
        self._step = step
        self._in_place = list(in_place)
        self._graphs: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> StepResultT:
        key = tuple(tuple(argument.shape) if isinstance(argument, Tensor) else argument for argument in arguments)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        with torch.no_grad():
            if key not in self._graphs:
                self._graphs[key] = extract_internal(_TracedCall(self._step, arguments, self._in_place))
            result: StepResultT = self._graphs[key](*tensors, *self._in_place)
        return result


class _TracedCall:
    """What `extract_internal` asks of a graph module: a function of `xla_args`, all of which are tensors.

    The tensors that are written in place are among them, marked as donors, so that the graph writes into their buffers.
    Weights are not: the graph keeps hold of those that it meets.
    """

    def __init__(self, step: Callable[..., Any], arguments: Sequence[Any], in_place: Sequence[Tensor]) -> None:
        self._step = step
        self._arguments = arguments
        self._in_place = in_place
        self.xla_args = [*(argument for argument in arguments if isinstance(argument, Tensor)), *in_place]

    def parameters(self) -> Iterator[Tensor]:
        """None besides `xla_args`."""
        return iter(())

    def __call__(self, *_tensors: Tensor) -> Any:
        """Trace the step; the tensors are those of `xla_args`."""
        for tensor in self._in_place:
            torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
        return self._step(*self._arguments)
