"""What follows from compiled graphs: whether they fit a chip, how many slots would, and the floor of a decode step."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpu_tgi_server.plan.chips import Chip, Tpu
from tpu_tgi_server.plan.messages import Compiled, Traced


@dataclass(frozen=True)
class Memory:
    """Bytes of one chip.

    Attributes:
        weights, cache: as they are, without padding.
        temporary: the rest of the most demanding graph: padding, inputs, results, intermediate values.
        programs: the compiled graphs themselves.
        limit: what the compiler lets a program use.
    """

    weights: int
    cache: int
    temporary: int
    programs: int
    limit: int

    @property
    def left(self) -> int:
        return self.limit - self.weights - self.cache - self.temporary - self.programs


def memory_of(traced: Traced, results: Mapping[str, Compiled | str], chip: Chip) -> Memory | None:
    """None if a graph does not compile: then nobody knows what it needs."""
    compiled = [result for result in results.values() if isinstance(result, Compiled)]
    if len(compiled) < len(results):
        return None
    return Memory(
        weights=traced.weights_bytes,
        cache=traced.cache_bytes,
        temporary=max(graph.memory_bytes for graph in compiled) - traced.weights_bytes - traced.cache_bytes,
        programs=sum(graph.code_bytes for graph in compiled),
        limit=chip.memory_bytes,
    )


def largest_batch(memory: Memory, num_slots: int) -> int:
    """How many slots fit by arithmetic, if temporary memory grows as the number of slots does. 0 if none."""
    bytes_a_slot = (memory.cache + memory.temporary) / num_slots
    return max(0, int((memory.limit - memory.weights - memory.programs) / bytes_a_slot))


def decode_floor_s(traced: Traced, chip: Chip) -> float:
    """Seconds to read the streamed weights and the whole cache once: no decode step over the full length is faster."""
    return (traced.streamed_bytes + traced.cache_bytes) / chip.bandwidth


def max_tokens_a_second(traced: Traced, tpu: Tpu, num_slots: int) -> float:
    """What all chips together cannot exceed: every slot of every model busy, every step at the floor."""
    num_models = tpu.num_chips // traced.num_cores
    return num_models * num_slots / decode_floor_s(traced, tpu.chip)
