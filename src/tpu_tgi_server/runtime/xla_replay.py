"""Steps that are traced once and replayed from then on.

Without this, torch_xla traces a step anew each time, which takes longer than a TPU needs to run it.
`torch.compile(backend="openxla")` replays too, but takes seconds a graph for its own tracing: here two layers took 4 s,
of which XLA's compilation was less than 1 s. So this hands the step straight to the function that the backend ends in.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import torch
import torch_xla
from torch import Tensor
from torch_xla._dynamo.dynamo_bridge import extract_internal

from tpu_tgi_server.runtime.interface import StepResultT

OnResult = Callable[[Tensor], None]


class ReplayedStep(Generic[StepResultT]):
    """Owns the graphs of one step: one for each combination of shapes and constants among its arguments."""

    def __init__(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor], on_result: OnResult) -> None:
        self._step = step
        self._in_place = list(in_place)
        self._on_result = on_result
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *arguments: Any) -> StepResultT:
        key = tuple(tuple(argument.shape) if isinstance(argument, Tensor) else argument for argument in arguments)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        with torch.no_grad():
            if key not in self._graphs:
                self._graphs[key] = self._trace(arguments)
            graph = self._graphs[key]
            outputs = graph.run(*tensors, *self._in_place)
        outputs = [outputs] if isinstance(outputs, Tensor) else outputs
        split = len(outputs) - len(self._in_place)
        _replace(graph.in_place, outputs[split:])
        result: Any = outputs[0] if split == 1 else tuple(outputs[:split])
        return cast(StepResultT, result)

    def _trace(self, arguments: Sequence[Any]) -> "_Graph":
        call = _TracedCall(self._step, arguments, self._in_place, self._on_result)
        run = extract_internal(call)
        _replace(self._in_place, call.before)
        return _Graph(run, call.in_place)


@dataclass(frozen=True)
class _Graph:
    """A compiled step.

    Attributes:
        run: takes the arguments and the tensors that are written in place; returns the results, and their new values.
        in_place: the tensors that are written in place, in the order in which `run` returns them.
    """

    run: Callable[..., Any]
    in_place: list[Tensor]


class _TracedCall:
    """What `extract_internal` asks of a graph module: a function of `xla_args`, all of which are tensors.

    The tensors that are written in place are among them, marked as donors, so that the graph writes into their buffers.
    They are among its results too. Left to itself, torch_xla 2.9 would copy the new values to them, which for a tensor
    that is spread over several cores is an execution of its own, and would lose what they held when they were traced.
    Weights are not among the arguments: the graph keeps hold of those that it meets.

    Attributes:
        before: what the tensors that are written in place held before the step was traced.
        in_place: the tensors that are written in place, in the order of the graph's parameters. XLA gives the buffers
            of donors of one shape to outputs of that shape in turn. In any other order each would be written into the
            buffer of another, and all of them would be copied in every step.
    """

    def __init__(
        self, step: Callable[..., Any], arguments: Sequence[Any], in_place: Sequence[Tensor], on_result: OnResult
    ) -> None:
        self._step = step
        self._arguments = arguments
        self._on_result = on_result
        self.in_place = list(in_place)
        self.xla_args = [*(argument for argument in arguments if isinstance(argument, Tensor)), *in_place]
        self.before: list[Tensor] = []

    def parameters(self) -> Iterator[Tensor]:
        """None besides `xla_args`."""
        return iter(())

    def __call__(self, *_tensors: Tensor) -> list[Tensor]:
        """Trace the step; the tensors are those of `xla_args`."""
        self.before = [torch.clone(tensor) for tensor in self.in_place]
        for tensor in self.in_place:
            torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
        ids = {id(tensor): torch_xla._XLAC._xla_get_tensor_id(tensor) for tensor in self.in_place}
        result = self._step(*self._arguments)
        results = [result] if isinstance(result, Tensor) else list(result)
        for tensor in results:
            self._on_result(tensor)
        parameter_ids, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([*results, *self.in_place])
        self.in_place.sort(key=lambda tensor: parameter_ids.index(ids[id(tensor)]))
        return [*results, *self.in_place]


def _replace(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Give tensors the values of others, without a copy."""
    for tensor, source in zip(tensors, sources, strict=True):
        torch_xla._XLAC._replace_xla_tensor(tensor, source)
