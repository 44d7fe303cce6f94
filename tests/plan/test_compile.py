"""What the compiler is told about a module."""

from tpu_tgi_server.plan.chips import HOSTS, Tpu
from tpu_tgi_server.plan.compile import sharding


def test_a_tensor_is_whole_on_every_core_or_spread_along_one_axis() -> None:
    assert sharding(None, 2, 4) == "{replicated}"
    assert sharding(1, 4, 4) == "{devices=[1,4,1,1]0,1,2,3}"
    assert sharding(0, 1, 2) == "{devices=[2]0,1}"


def test_every_host_that_can_be_planned_for_has_a_shape_of_its_chips() -> None:
    for tpu in Tpu:
        rows, columns = HOSTS[tpu.num_chips]
        assert rows * columns == tpu.num_chips
