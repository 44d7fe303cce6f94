"""What `--parallel auto` means. Touches no device: the choice comes before any process may hold one."""

from tpu_tgi_server.config import Device, Parallel

USEFUL_SLOTS = 4
"""With fewer slots than this beside its weights, a core reads all weights for too few tokens."""

WORKING_SHARE = 0.1
"""Of a core's memory, for what a step computes and for what XLA keeps to itself."""


def choose_parallel(
    wanted: Parallel,
    device: Device,
    num_cores: int,
    weight_bytes: int,
    slot_bytes: int,
    num_slots: int,
    core_bytes: int | None,
) -> Parallel:
    """How the cores are used: `replica` where one core holds the model and a useful cache, else `tensor`.

    Still `auto` means one core: where there is no other, or no TPU and nobody asked.

    Args:
        wanted: what the operator asked for; anything but `auto` is taken.
        device: resolved.
        num_cores: of the host.
        weight_bytes: of the whole model in its dtype.
        slot_bytes: of the keys and values of one slot, all heads.
        num_slots: that the operator asked for; a cache of fewer is useful if it has these.
        core_bytes: the memory of one core; None if it is not known, which counts as enough.
    """
    if wanted is not Parallel.AUTO:
        return wanted
    if device is not Device.TPU or num_cores == 1:
        return Parallel.AUTO
    if core_bytes is None:
        return Parallel.REPLICA
    needed = weight_bytes + min(num_slots, USEFUL_SLOTS) * slot_bytes
    return Parallel.REPLICA if needed <= core_bytes * (1 - WORKING_SHARE) else Parallel.TENSOR
