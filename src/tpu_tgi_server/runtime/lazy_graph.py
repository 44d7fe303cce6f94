"""A step as torch_xla's lazy tensors: what it computes and from which buffers, before anything is compiled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch_xla
from torch import Tensor

OnResult = Callable[[Tensor], None]


@dataclass(frozen=True)
class LazyGraph:
    """A step that has been traced.

    Attributes:
        results: what the step returns.
        in_place: the tensors that it writes in place, in the order in which it takes them.
        parameters: the tensors that it takes, in the order in which XLA will number them.
        handles: their buffers.
        sources: for each parameter its index among the tensors of the arguments and then those written in place, None
            for a tensor that never changes, such as a weight.
    """

    results: list[Tensor]
    in_place: list[Tensor]
    parameters: list[Tensor]
    handles: list[int]
    sources: list[int | None]

    @property
    def outputs(self) -> list[Tensor]:
        """What the graph returns."""
        return [*self.results, *self.in_place]


@contextmanager
def lazy_graph(
    step: Callable[..., Any], arguments: Sequence[Any], in_place: Sequence[Tensor], on_result: OnResult
) -> Iterator[LazyGraph]:
    """Trace a step. Afterwards the tensors that it writes are what they were.

    XLA gives the buffers of donors of one shape to outputs of that shape in turn. So the outputs go in the order of the
    parameters: in any other, each would be written into the buffer of another, and be copied in every step.

    Tensors are told from each other by their buffers. torch_xla's bridge for dynamo goes by its numbers of tensors, but
    with several cores those of buffers that two graphs meet get lost.

    Args:
        step: a function of tensors and constants that returns one or several tensors.
        arguments: what it is called with.
        in_place: the tensors that it writes in place.
        on_result: called with each result.
    """
    known = [*[argument for argument in arguments if isinstance(argument, Tensor)], *in_place]
    handles = torch_xla._XLAC._get_tensors_handle(known)
    indexes = {handle: index for index, handle in enumerate(handles)}
    before = [torch.clone(tensor) for tensor in in_place]
    for tensor in in_place:
        torch.ops.xla.dynamo_set_buffer_donor_(tensor, True)
    try:
        with torch.no_grad():
            result = step(*arguments)
        results = [result] if isinstance(result, Tensor) else list(cast(Sequence[Tensor], result))
        for tensor in results:
            on_result(tensor)
        _, parameters = torch_xla._XLAC._get_tensors_xla_device_data_node([*results, *in_place])
        parameter_handles = torch_xla._XLAC._get_tensors_handle(parameters)
        ranks = {handle: rank for rank, handle in enumerate(parameter_handles)}
        order = sorted(range(len(in_place)), key=lambda index: ranks[handles[index - len(in_place)]])
        yield LazyGraph(
            results=results,
            in_place=[in_place[index] for index in order],
            parameters=parameters,
            handles=parameter_handles,
            sources=[indexes.get(handle) for handle in parameter_handles],
        )
    finally:
        replace(in_place, before)
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))


def replace(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Give tensors the values of others, without a copy."""
    for tensor, source in zip(tensors, sources, strict=True):
        torch_xla._XLAC._replace_xla_tensor(tensor, source)
