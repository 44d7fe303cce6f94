"""Facts read from modules in XLA's text form. Nothing else of them is interpreted."""

import math
import re
from collections.abc import Collection

ITEM = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[([\d,]*)\]\{?([^}]*)\}? (copy|transpose|convert)\(", re.MULTILINE
)
IN_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")


def buffer_donors(module_text: str) -> list[int]:
    """The parameters whose buffers the program may overwrite, from the header of a module that is not compiled yet."""
    header = module_text.split("\n", 1)[0]
    donors = re.search(r"buffer_donor=\{ (.*?\)) \}", header)
    return [int(number) for number in re.findall(r"\((\d+), \{\}\)", donors[1])] if donors else []


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
