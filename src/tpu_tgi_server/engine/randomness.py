"""Random numbers as a pure function of (seed, step), so that they depend on no batch, no join and no core."""

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float32]:
    """One number in [0, 1) for each pair of seed and step.

    SplitMix64 (Steele, Lea and Flood 2014) over the mixed seed and the step: every one of the 2**64 seeds has a stream
    of its own.

    Args:
        seeds: uint64 [N].
        steps: uint64 [N], the number of the token from 0.

    Returns:
        float32 [N], multiples of 2**-24.
    """
    bits = _mix(_mix(seeds + _GOLDEN_GAMMA) + (steps + np.uint64(1)) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, a bijection of 64-bit numbers."""
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))
