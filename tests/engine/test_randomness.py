"""Random numbers as a function of (seed, step)."""

import numpy as np
import pytest

from tpu_tgi_server.engine.randomness import uniform


def numbers(seeds: list[int], steps: list[int]) -> list[float]:
    return [float(x) for x in uniform(np.array(seeds, np.uint64), np.array(steps, np.uint64))]


def test_depends_on_seed_and_step_alone() -> None:
    together = numbers([7, 8, 7], [0, 0, 1])
    assert together == [*numbers([7], [0]), *numbers([8], [0]), *numbers([7], [1])]
    assert len(set(together)) == 3


@pytest.mark.parametrize("other", [1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_every_bit_of_the_seed_counts(other: int) -> None:
    assert numbers([0] * 8, list(range(8))) != numbers([other] * 8, list(range(8)))


def test_is_uniform_over_seeds_and_over_steps() -> None:
    for values in (numbers(list(range(100_000)), [0] * 100_000), numbers([5] * 100_000, list(range(100_000)))):
        assert min(values) >= 0
        assert max(values) < 1
        shares = np.histogram(values, bins=50, range=(0, 1))[0] / len(values)
        assert abs(shares - 0.02).max() < 0.002
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01
