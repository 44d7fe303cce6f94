"""What `--parallel auto` chooses."""

import pytest

from tpu_tgi_server.config import Parallel
from tpu_tgi_server.runtime.parallel import ModelNeeds, choose_parallel

GB = 10**9
LLAMA_8B = ModelNeeds(weight_bytes=16 * GB, slot_bytes=268 * 10**6)


@pytest.mark.parametrize(("core_gb", "chosen"), [(16, Parallel.TENSOR), (18, Parallel.TENSOR), (19, Parallel.REPLICA)])
def test_replicas_where_the_model_and_a_useful_cache_fit_one_core(core_gb: int, chosen: Parallel) -> None:
    """16 GB of weights and 4 slots of 0.27 GB, with a tenth of the core left over."""
    assert choose_parallel(LLAMA_8B, num_slots=4, num_chips=4, core_bytes=core_gb * GB)[0] is chosen


@pytest.mark.parametrize(("num_slots", "chosen"), [(64, Parallel.REPLICA), (256, Parallel.TENSOR)])
def test_each_replica_must_hold_its_part_of_the_slots_that_were_asked_for(num_slots: int, chosen: Parallel) -> None:
    assert choose_parallel(LLAMA_8B, num_slots, num_chips=4, core_bytes=24 * GB)[0] is chosen


def test_sentence_gives_the_figures() -> None:
    assert choose_parallel(LLAMA_8B, num_slots=16, num_chips=4, core_bytes=32 * GB)[1] == (
        "parallel: replica on 4 chips, as the weights (16.0 GB) and 4 slots (1.1 GB) "
        "fit the 28.8 GB that one chip has for them"
    )
    assert choose_parallel(LLAMA_8B, num_slots=2, num_chips=8, core_bytes=16 * GB)[1] == (
        "parallel: tensor over 8 chips, as the weights (16.0 GB) and 2 slots (0.5 GB) "
        "do not fit the 14.4 GB that one chip has for them"
    )
