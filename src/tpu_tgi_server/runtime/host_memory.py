"""How the C library hands freed memory back to the host."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_MMAP_THRESHOLD = -3
"""glibc's number, see mallopt(3)."""

RETURNED_BYTES = 1 << 17
USUAL_BYTES = 32 << 20
"""As far as glibc raises the threshold by itself when large blocks are freed."""


@contextmanager
def freed_blocks_are_returned() -> Iterator[None]:
    """Within, every freed block of 128 KB or more goes back to the host at once.

    glibc would keep blocks of up to 32 MB for later and never find a fitting use for many of them: while weights pass
    through the host to an XLA device, that comes to half the size of the weights (measured with glibc 2.36).
    Another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, USUAL_BYTES)
