"""Where each weight of a model goes when several cores share it: a pass over the unmodified model.

transformers says for each family which weights are split by their outputs and which by their inputs (its tensor
parallel plan). XLA's partitioner does the rest: it finds out where cores have to exchange what they computed, and pads
what does not divide, so a split never changes a result.
"""

import re
from collections.abc import Mapping, Sequence
from math import prod

from loguru import logger
from torch import Tensor, nn
from transformers import PreTrainedModel

from tpu_tgi_server.runtime.interface import Runtime

OUTPUT_STYLES = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
INPUT_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
EMBEDDING_AXES = {"embedding_rowwise": 0, "embedding_colwise": 1}


def split_axis(style: str | None, num_axes: int) -> int | None:
    """The axis along which a weight is split, None if every core has all of it.

    Weights are [outputs, inputs], of experts [experts, outputs, inputs]. A bias goes with the outputs.

    Args:
        style: what transformers' plan says of the weight's module, None if nothing.
        num_axes: how many axes the weight has.
    """
    if style in OUTPUT_STYLES:
        return max(num_axes - 2, 0)
    if style in INPUT_STYLES:
        return num_axes - 1 if num_axes > 1 else None
    return EMBEDDING_AXES.get(style or "") if num_axes > 1 else None


def bytes_a_core(shape: Sequence[int], itemsize: int, axis: int | None, num_cores: int) -> int:
    """How much of a tensor each core holds, padding included."""
    sizes = list(shape)
    if axis is not None:
        sizes[axis] = -(-sizes[axis] // num_cores)
    return prod(sizes) * itemsize


class WeightPlacer:
    """Owns the count of what each core has been given.

    Attributes:
        num_bytes_a_core: of the weights that were placed so far.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.num_bytes_a_core = 0

    def place(self, model: PreTrainedModel, name: str, weight: Tensor) -> Tensor:
        """Copy a weight from the host to the cores, each its part. Names are those of `model.named_parameters()`."""
        axis = split_axis(style_of(name, model.tp_plan), weight.dim())
        self.num_bytes_a_core += bytes_a_core(weight.shape, weight.itemsize, axis, self.runtime.num_cores)
        return self.runtime.to_device(weight, axis)


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """What transformers' plan says of a weight: it names a module, or a weight, and has a star for every number."""
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    return plan.get(pattern, plan.get(pattern.rpartition(".")[0]))


def share_out(model: PreTrainedModel, placer: WeightPlacer) -> None:
    """What is left to do when the weights of a model are placed: buffers, ties, and the whole logits for every core."""
    runtime = placer.runtime
    for name, buffer in list(model.named_buffers()):
        if buffer.device.type != runtime.device.type:
            _replace(model, name, placer.place(model, name, buffer))
    model.tie_weights()  # a weight that is shared was placed under one name only
    if runtime.num_cores > 1:
        gather_logits(model, runtime)
        if not model.tp_plan:
            family = type(model).__name__
            logger.warning("transformers has no plan for splitting {}: each core holds all weights", family)
        logger.info("{:.1f} MB of weights on each of {} cores", placer.num_bytes_a_core / 1e6, runtime.num_cores)


def gather_logits(model: PreTrainedModel, runtime: Runtime) -> None:
    """Let every core have the logits of the whole vocabulary: all choose the same token as one core would."""

    def gather(_module: nn.Module, _inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        runtime.gather(logits)

    model.get_output_embeddings().register_forward_hook(gather)


def _replace(model: PreTrainedModel, name: str, tensor: Tensor) -> None:
    module_name, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module_name), attribute, tensor)
