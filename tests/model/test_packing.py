"""How prompts are laid out for one prefill, and the buckets that they are padded to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_tgi_server.model import buckets
from tpu_tgi_server.model.interface import Prompt
from tpu_tgi_server.model.packing import pack_prompts

NUM_SLOTS = 6
MAX_TOTAL_TOKENS = 32


@st.composite
def prompts(draw: st.DrawFn) -> list[Prompt]:
    """Prompts in different slots, some of which are answered without being kept."""
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True))
    return [
        Prompt(
            slot,
            draw(st.lists(st.integers(1, 99), min_size=1, max_size=12)),
            is_kept=draw(st.booleans()),
            slot_len=draw(st.integers(0, MAX_TOTAL_TOKENS - 2)),
        )
        for slot in slots
    ]


@given(prompts(), st.integers(0, 10))
def test_every_token_is_in_its_prompts_place_and_padding_in_scratch(packed_prompts: list[Prompt], spare: int) -> None:
    num_tokens = sum(len(prompt.token_ids) for prompt in packed_prompts) + spare
    packed = pack_prompts(packed_prompts, num_tokens, NUM_SLOTS)
    assert packed.dtype == np.int32
    assert packed.shape == (5 * num_tokens + NUM_SLOTS,)
    last_indexes = packed[-NUM_SLOTS:].tolist()
    columns = packed[:-NUM_SLOTS].reshape(5, num_tokens).T.tolist()
    start = 0
    for segment, prompt in enumerate(packed_prompts):
        end = start + len(prompt.token_ids)
        cells = range(len(prompt.token_ids)) if prompt.is_kept else [prompt.slot_len] * len(prompt.token_ids)
        assert columns[start:end] == [
            [token, segment, position, prompt.slot, cell]
            for position, (token, cell) in enumerate(zip(prompt.token_ids, cells, strict=True))
        ]
        assert last_indexes[prompt.slot] == end - 1
        start = end
    last = packed_prompts[-1]
    scratch = len(last.token_ids) if last.is_kept else last.slot_len
    for _, segment, _, slot, cell in columns[start:]:
        assert segment == len(packed_prompts), "padding is seen by a prompt"
        assert (slot, cell) == (last.slot, scratch)
    unused = set(range(NUM_SLOTS)) - {prompt.slot for prompt in packed_prompts}
    assert all(last_indexes[slot] == 0 for slot in unused)


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


def test_the_list_of_graphs() -> None:
    names = [str(graph) for graph in buckets.graphs(max_input_tokens=100, max_total_tokens=600)]
    shapes = ["prefill 16", "prefill 32", "prefill 64", "prefill 128", "decode 256", "decode 512", "decode 600"]
    assert names == [f"{shape} greedy" for shape in shapes] + [f"{shape} sampled" for shape in shapes]


@pytest.mark.parametrize(("size", "bucket"), [(1, 16), (16, 16), (17, 32), (40, 40)])
def test_smallest_bucket(size: int, bucket: int) -> None:
    assert buckets.smallest_bucket((16, 32, 40), size) == bucket


def test_nothing_is_larger_than_the_largest_bucket() -> None:
    with pytest.raises(ValueError, match="41 does not fit the largest bucket, 40"):
        buckets.smallest_bucket((16, 32, 40), 41)
