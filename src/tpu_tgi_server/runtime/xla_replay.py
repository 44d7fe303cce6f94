"""Steps that are traced once and replayed from then on.

Without this, torch_xla traces a step anew each time, which takes longer than a TPU needs to run it.
`torch.compile(backend="openxla")` replays too, but takes seconds a graph for its own tracing: here two layers took 4 s,
of which XLA's compilation was less than 1 s. So this does what the backend ends in (`extract_internal` in torch_xla
2.9's `_dynamo/dynamo_bridge.py`), except for tensors that are written in place: the bridge copies new values to them,
which for a tensor that is spread over several cores is an execution of its own, and loses what they held before.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch_xla._dynamo.dynamo_bridge import alias_with_buffer_donor_config

from tpu_tgi_server.runtime.interface import StepResultT
from tpu_tgi_server.runtime.lazy_graph import OnResult, lazy_graph, replace


class ReplayedStep(Generic[StepResultT]):
    """Owns the graphs of one step: one for each combination of shapes and constants among its arguments.

    Args:
        step: a function of tensors and constants that returns one or several tensors.
        in_place: the tensors that it writes in place.
        on_result: called with each result while the step is traced.
    """

    def __init__(self, step: Callable[..., StepResultT], in_place: Sequence[Tensor], on_result: OnResult) -> None:
        self._step = step
        self._in_place = list(in_place)
        self._on_result = on_result
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *arguments: Any) -> StepResultT:
        key = tuple(tuple(argument.shape) if isinstance(argument, Tensor) else argument for argument in arguments)
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if key not in self._graphs:
            self._graphs[key] = self._compile(arguments)
        results = self._graphs[key].run([*tensors, *self._in_place])
        return cast(StepResultT, results[0] if len(results) == 1 else tuple(results))

    def _compile(self, arguments: Sequence[Any]) -> "_Graph":
        torch_xla.sync(reset_scope=False)  # or the graph would begin with what is still to be computed
        xm.wait_device_ops()
        with lazy_graph(self._step, arguments, self._in_place, self._on_result) as graph:
            with alias_with_buffer_donor_config():
                hash = torch_xla._XLAC._get_graph_hash(graph.outputs)
                torch_xla._XLAC._xla_warm_up_cache(graph.outputs, [])
            inputs = [
                value if source is None else source
                for source, value in zip(graph.sources, graph.parameters, strict=True)
            ]
            return _Graph(hash, inputs, graph.in_place)


@dataclass(frozen=True)
class _Graph:
    """A compiled step.

    Attributes:
        hash: its name in torch_xla's cache.
        inputs: for each parameter the index of an argument, or a tensor that never changes, such as a weight.
        in_place: the tensors that are written in place, in the order in which the graph returns them.
    """

    hash: Any
    inputs: list[int | Tensor]
    in_place: list[Tensor]

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Start the graph with tensors that are on the device; its results."""
        inputs = [arguments[source] if isinstance(source, int) else source for source in self.inputs]
        outputs = torch_xla._XLAC._run_cached_graph(self.hash, inputs)
        split = len(outputs) - len(self.in_place)
        replace(self.in_place, outputs[split:])
        results: list[Tensor] = outputs[:split]
        return results
