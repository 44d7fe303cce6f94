"""The fixed list of graphs. Everything that runs is padded to one of these shapes, so nothing else ever compiles."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal

from tpu_tgi_server.model.interface import Graph

MIN_PREFILL_TOKENS = 16
MIN_CONTEXT_LEN = 256


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """`smallest` doubled while below `largest`, then `largest` itself."""
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return (*sizes, largest)


def round_up_to_power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def prefill_buckets(max_row_tokens: int) -> tuple[int, ...]:
    """Numbers of packed prompt tokens, rising; the last is the size of a chunk."""
    return powers_of_two(MIN_PREFILL_TOKENS, max(MIN_PREFILL_TOKENS, max_row_tokens))


def chunk_buckets(chunk_tokens: int, max_input_tokens: int, max_total_tokens: int) -> tuple[int, ...]:
    """How many cache positions the continuation of a long prompt reads, rising; none if no prompt is longer than a
    chunk."""
    if max_input_tokens <= chunk_tokens:
        return ()
    windows = decode_buckets(max_total_tokens)
    return tuple(
        window
        for window, smaller in zip(windows, (0, *windows), strict=False)
        if window > chunk_tokens and smaller < max_input_tokens
    )


def decode_buckets(max_total_tokens: int) -> tuple[int, ...]:
    """How many cache positions a decode step reads, rising; the last is the whole cache."""
    return powers_of_two(MIN_CONTEXT_LEN, max_total_tokens)


def smallest_bucket(buckets: Sequence[int], size: int) -> int:
    """The smallest of the rising `buckets` that holds `size`.

    Raises:
        ValueError: none does.
    """
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"{size} does not fit the largest bucket, {buckets[-1]}")
    return buckets[index]


def graphs(max_row_tokens: int, max_input_tokens: int, max_total_tokens: int) -> tuple[Graph, ...]:
    """Every graph that warm-up compiles. The number of slots is not among the arguments: it does not matter."""
    prefills = prefill_buckets(max_row_tokens)
    shapes: list[tuple[Literal["prefill", "chunk", "decode"], int]] = [
        *(("prefill", size) for size in prefills),
        *(("chunk", size) for size in chunk_buckets(prefills[-1], max_input_tokens, max_total_tokens)),
        *(("decode", size) for size in decode_buckets(max_total_tokens)),
    ]
    return tuple(Graph(kind, size, has_sampler) for has_sampler in (False, True) for kind, size in shapes)
