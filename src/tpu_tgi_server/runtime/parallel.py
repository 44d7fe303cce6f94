"""What `--parallel auto` means on a host with several chips. Touches no device: the choice comes before any process may
hold one."""

from dataclasses import dataclass

from tpu_tgi_server.config import Parallel

USEFUL_SLOTS = 4
"""With fewer slots than this beside its weights, a core reads all weights for too few tokens."""

WORKING_SHARE = 0.1
"""Of a core's memory, for what a step computes and for what XLA keeps to itself."""


@dataclass(frozen=True)
class ModelNeeds:
    """What a model takes of the memory of the cores.

    Attributes:
        weight_bytes: of the whole model, as it is served.
        slot_bytes: of the keys and values of one slot, all heads.
    """

    weight_bytes: int
    slot_bytes: int


def choose_parallel(needs: ModelNeeds, num_slots: int, num_chips: int, core_bytes: int) -> tuple[Parallel, str]:
    """How the chips are used: `replica` where one holds the model and its part of the cache, else `tensor`.

    Args:
        needs: of the model.
        num_slots: that the operator asked for, which replicas divide. Each should have room for USEFUL_SLOTS of them.
        num_chips: of the host, at least 2.
        core_bytes: the memory of one of them.

    Returns:
        The choice, and the sentence that gives the reason.
    """
    slots = max(-(-num_slots // num_chips), min(num_slots, USEFUL_SLOTS))
    cache_bytes = slots * needs.slot_bytes
    usable_bytes = core_bytes * (1 - WORKING_SHARE)
    fits = needs.weight_bytes + cache_bytes <= usable_bytes
    choice = f"{Parallel.REPLICA} on" if fits else f"{Parallel.TENSOR} over"
    reason = (
        f"the weights ({gigabytes(needs.weight_bytes)}) and {slots} slots ({gigabytes(cache_bytes)}) "
        f"{'fit' if fits else 'do not fit'} the {gigabytes(usable_bytes)} that one chip has for them"
    )
    parallel = Parallel.REPLICA if fits else Parallel.TENSOR
    return parallel, f"parallel: {choice} {num_chips} chips, as {reason}"


def gigabytes(num_bytes: float) -> str:
    """In words."""
    return f"{num_bytes / 1e9:.1f} GB"
