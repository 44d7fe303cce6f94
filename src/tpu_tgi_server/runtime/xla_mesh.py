"""All cores of the host as one row, over which XLA's partitioner (GSPMD) spreads tensors."""

from functools import cache
from typing import Any

import numpy as np
import torch_xla
from torch import Tensor
from torch_xla.distributed.spmd import Mesh


class CoreMesh:
    """Owns the order of the cores."""

    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self._mesh = Mesh(np.arange(num_cores), (num_cores,), ("cores",))
        self._sharding = cache(self._sharding_of)

    def mark(self, tensor: Tensor, split_axis: int | None) -> None:
        """Spread a tensor along an axis, or, without one, let every core have all of it.

        Everything that comes from the host or goes there is marked: torch_xla 2.9 compiles a graph each time a tensor
        is read that is not known to be whole on every core, and traces a step anew when its arguments' marks change.
        """
        axis = None if split_axis is None else split_axis % tensor.dim()
        torch_xla._XLAC._xla_mark_sharding(tensor, self._sharding(tensor.dim(), axis))

    def _sharding_of(self, num_axes: int, split_axis: int | None) -> Any:
        return self._mesh.get_op_sharding(tuple("cores" if axis == split_axis else None for axis in range(num_axes)))
