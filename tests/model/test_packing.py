"""How prompts are laid out for one prefill, and the buckets that they are padded to."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.interface import PromptChunk
from tpu_tgi_server.model.packing import pack_chunks, unpack_chunks

NUM_SLOTS = 6
MAX_TOTAL_TOKENS = 32


@st.composite
def chunks(draw: st.DrawFn) -> list[PromptChunk]:
    """Chunks in different slots, some of which are answered without being kept."""
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True))
    return [
        PromptChunk(
            slot,
            draw(st.lists(st.integers(1, 99), min_size=1, max_size=12)),
            start=draw(st.sampled_from([0, 0, 3, 9])),
            next_id=draw(st.integers(0, 99)),
            is_kept=draw(st.booleans()),
            scratch_position=draw(st.integers(0, MAX_TOTAL_TOKENS - 2)),
        )
        for slot in slots
    ]


@given(chunks(), st.integers(0, 10))
def test_every_token_is_in_its_prompts_place_and_padding_in_scratch(
    packed_chunks: list[PromptChunk], spare: int
) -> None:
    num_tokens = sum(len(chunk.token_ids) for chunk in packed_chunks) + spare
    packed = pack_chunks(packed_chunks, num_tokens, NUM_SLOTS)
    assert packed.dtype == np.int32
    assert packed.shape == (6 * num_tokens + 2 * NUM_SLOTS,)
    row = unpack_chunks(torch.from_numpy(packed), NUM_SLOTS)
    fields = (row.token_ids, row.next_ids, row.segments, row.positions, row.slots, row.write_positions)
    columns = torch.stack(fields).T.tolist()
    begin = 0
    for segment, chunk in enumerate(packed_chunks):
        end = begin + len(chunk.token_ids)
        positions = range(chunk.start, chunk.end)
        places = positions if chunk.is_kept else [chunk.scratch_position] * len(chunk.token_ids)
        next_ids = [*chunk.token_ids[1:], chunk.next_id]
        assert columns[begin:end] == [
            [token, next_id, segment, position, chunk.slot, place]
            for token, next_id, position, place in zip(chunk.token_ids, next_ids, positions, places, strict=True)
        ]
        assert row.last_indexes[chunk.slot] == end - 1
        assert row.is_begun[chunk.slot] == (chunk.is_kept and chunk.start == 0)
        begin = end
    last = packed_chunks[-1]
    scratch = last.end if last.is_kept else last.scratch_position
    for _, _, segment, _, slot, place in columns[begin:]:
        assert segment == len(packed_chunks), "padding is seen by a prompt"
        assert (slot, place) == (last.slot, scratch)
    for slot in set(range(NUM_SLOTS)) - {chunk.slot for chunk in packed_chunks}:
        assert row.last_indexes[slot] == row.is_begun[slot] == 0


@given(st.integers(1, 5000))
def test_prefill_buckets_hold_every_prompt_and_waste_less_than_half(max_input_tokens: int) -> None:
    sizes = buckets.prefill_buckets(max_input_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] >= max_input_tokens
    for num_tokens in {1, max_input_tokens // 2 + 1, max_input_tokens}:
        bucket = buckets.smallest_bucket(sizes, num_tokens)
        assert num_tokens <= bucket <= max(buckets.MIN_PREFILL_TOKENS, 2 * num_tokens)


@given(st.integers(2, 5000))
def test_decode_buckets_end_with_the_whole_cache(max_total_tokens: int) -> None:
    sizes = buckets.decode_buckets(max_total_tokens)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == max_total_tokens


@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([16, 64, 512]))
def test_chunk_buckets_hold_what_every_continuation_reads(
    max_input_tokens: int, max_new_tokens: int, chunk_tokens: int
) -> None:
    sizes = buckets.chunk_buckets(chunk_tokens, max_input_tokens, max_input_tokens + max_new_tokens)
    assert list(sizes) == sorted(set(sizes))
    if max_input_tokens <= chunk_tokens:
        assert sizes == ()
        return
    for end in {chunk_tokens + 1, max_input_tokens}:
        assert end <= buckets.smallest_bucket(sizes, end)


def test_the_list_of_graphs() -> None:
    names = [str(graph) for graph in buckets.graphs(max_row_tokens=128, max_input_tokens=400, max_total_tokens=600)]
    shapes = ["prefill 16", "prefill 32", "prefill 64", "prefill 128", "chunk 256", "chunk 512"]
    shapes += ["decode 256", "decode 512", "decode 600"]
    assert names == [f"{shape} greedy" for shape in shapes] + [f"{shape} sampled" for shape in shapes]


@pytest.mark.parametrize(("size", "bucket"), [(1, 16), (16, 16), (17, 32), (40, 40)])
def test_smallest_bucket(size: int, bucket: int) -> None:
    assert buckets.smallest_bucket((16, 32, 40), size) == bucket


def test_nothing_is_larger_than_the_largest_bucket() -> None:
    with pytest.raises(ValueError, match="41 does not fit the largest bucket, 40"):
        buckets.smallest_bucket((16, 32, 40), 41)
