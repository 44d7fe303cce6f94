"""Facts read from modules in XLA's text form. Nothing else of them is interpreted."""

import math
import re
from collections.abc import Collection

ITEM = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[([\d,]*)\]\{?([^}]*)\}? (copy|transpose|convert)\(", re.MULTILINE
)
COLLECTIVE = re.compile(
    r"= (\S+|\(.*?\)) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(-start)?\("
    r".*?channel_id=(\d+)"
)
SHAPE = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")
IN_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")


def num_aliased(module_text: str) -> int:
    """How many outputs of a compiled module are written over a parameter."""
    return len(re.findall(r"(?:may|must)-alias", module_text.split("\n", 1)[0]))


def num_copies(module_text: str, sizes: Collection[int]) -> int:
    """How many instructions of a compiled module put a copy of so many elements into main memory.

    Copies, transposes and conversions count, in any layout and dtype; what stays in on-chip memory, `S(1)`, does not,
    and neither does what is inside a fusion, as only a fusion's result exists.

    Args:
        module_text: a compiled module.
        sizes: numbers of elements, those of the cache's tensors.
    """
    entry = module_text[module_text.rindex("\nENTRY ") :]
    found = 0
    for match in ITEM.finditer(entry):
        num_elements = math.prod(int(size) for size in match[2].split(",") if size)
        found += num_elements in sizes and not IN_OTHER_MEMORY.search(match[3])
    return found


def collectives(module_text: str) -> tuple[dict[str, int], dict[str, int]]:
    """How many exchanges between cores of each kind a compiled module has, and the bytes of their results on each core.

    The compiler may cut an exchange into pieces, so that others run meanwhile: they share a channel, and count once.
    """
    counts: dict[str, int] = {}
    num_bytes: dict[str, int] = {}
    seen = set()
    for shape, kind, start, channel in COLLECTIVE.findall(module_text):
        if (kind, channel) in seen:
            continue
        seen.add((kind, channel))
        sizes = [size_of(*match) for match in SHAPE.findall(shape)]
        has_operand = start and kind != "all-reduce"  # the pair of what is sent and what arrives
        counts[kind] = counts.get(kind, 0) + 1
        num_bytes[kind] = num_bytes.get(kind, 0) + (sizes[1] if has_operand else sum(sizes))
    return counts, num_bytes


def size_of(kind: str, num_bits: str, sizes: str) -> int:
    """Bytes of an array without padding, from the parts of its text, such as `bf`, `16` and `8,128`."""
    num_elements = math.prod(int(size) for size in sizes.split(",") if size)
    return num_elements * (1 if kind == "pred" else int(num_bits or 0) // 8)
