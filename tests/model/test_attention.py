"""Attention over the slot cache against torch's own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tpu_tgi_server.model.attention import WHOLE_ROW, DecodeStep, PrefillStep, prompts_of_row, running, slot_attention
from tpu_tgi_server.model.cache import Places, StaticCacheXla
from tpu_tgi_server.model.grouped_attention import attend_by_products, attend_fused

NUM_SLOTS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE, MAX_LEN = 3, 2, 6, 8, 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def new_cache() -> StaticCacheXla:
    """A cache of one layer whose cells hold large numbers, so that a read of a cell that was not written shows."""
    shape = (NUM_SLOTS, NUM_KV_HEADS, MAX_LEN, HEAD_SIZE)
    return StaticCacheXla([torch.full(shape, 1e4)], [torch.full(shape, 1e4)], MAX_LEN)


def heads(num_heads: int, num_tokens: int, num_rows: int = 1) -> Tensor:
    return torch.randn(num_rows, num_heads, num_tokens, HEAD_SIZE)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def peer(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float) -> Tensor:
    output = scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2)


def causal_mask(num_tokens: int, window: int | None) -> Tensor:
    distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


class Layer(torch.nn.Module):
    layer_idx = 0


@pytest.fixture(params=[None, 3], ids=["full", "window"])
def window(request: pytest.FixtureRequest) -> int | None:
    window: int | None = request.param
    return window


def run(
    query: Tensor, keys: Tensor, values: Tensor, step: PrefillStep | DecodeStep, window: int | None = None
) -> Tensor:
    with running(step):
        return slot_attention(Layer(), query, keys, values, None, sliding_window=window)[0]


def prefill_step(cache: StaticCacheXla, *prompts: tuple[int, int], parts: Sequence[slice] = WHOLE_ROW) -> PrefillStep:
    """Prompts given by slot and length, packed in a row."""
    segments = [number for number, (_, length) in enumerate(prompts) for _ in range(length)]
    positions = [position for _, length in prompts for position in range(length)]
    slots = [slot for slot, length in prompts for _ in range(length)]
    return PrefillStep(cache, int32(*segments), int32(*positions), Places(int32(*slots), int32(*positions)), parts)


@pytest.mark.parametrize("parts", [WHOLE_ROW, (slice(0, 4), slice(4, 9))], ids=["whole", "in parts"])
def test_packed_prompts_do_not_see_each_other(window: int | None, parts: Sequence[slice]) -> None:
    query, keys, values = heads(NUM_HEADS, 9), heads(NUM_KV_HEADS, 9), heads(NUM_KV_HEADS, 9)
    output = run(query, keys, values, prefill_step(new_cache(), (2, 4), (0, 5), parts=parts), window)
    for part in (slice(0, 4), slice(4, 9)):
        mask = causal_mask(part.stop - part.start, window)
        expected = peer(query[:, :, part], keys[:, :, part], values[:, :, part], mask, HEAD_SIZE**-0.5)
        torch.testing.assert_close(output[:, part], expected)


def test_long_rows_are_cut_into_their_prompts_and_short_ones_stay_whole() -> None:
    lengths = [100, 30, 70]
    segments = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))
    assert list(prompts_of_row(segments)) == [slice(0, 100), slice(100, 130), slice(130, 200)]
    assert prompts_of_row(segments[80:120]) == WHOLE_ROW


def test_decode_continues_each_slot_at_its_own_length(window: int | None) -> None:
    """Prefill of all but the last token, then a decode, equals the last row of full attention."""
    cache, lengths = new_cache(), (4, 1, 7)
    full = [[heads(num, length) for num in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)] for length in lengths]
    for slot, (query, keys, values) in enumerate(full):
        if lengths[slot] > 1:
            step = prefill_step(cache, (slot, lengths[slot] - 1))
            run(query[:, :, :-1], keys[:, :, :-1], values[:, :, :-1], step, window)
    query, keys, values = (torch.cat([tensors[part][:, :, -1:] for tensors in full]) for part in range(3))
    positions = int32(*[length - 1 for length in lengths])
    decode = DecodeStep(cache, Places(int32(*range(NUM_SLOTS)), positions), context_len=8)
    output = run(query, keys, values, decode, window)
    for slot, (query, keys, values) in enumerate(full):
        expected = peer(query, keys, values, causal_mask(lengths[slot], window), HEAD_SIZE**-0.5)
        torch.testing.assert_close(output[slot, 0], expected[0, -1])


def test_attention_sinks_are_refused() -> None:
    query, keys = heads(NUM_HEADS, 2), heads(NUM_KV_HEADS, 2)
    with running(prefill_step(new_cache(), (0, 2))), pytest.raises(NotImplementedError, match="sinks"):
        slot_attention(Layer(), query, keys, keys, None, s_aux=torch.zeros(6))


def test_cache_writes_only_the_cells_that_are_named() -> None:
    cache = new_cache()
    keys, values = torch.randn(2, NUM_KV_HEADS, HEAD_SIZE), torch.randn(2, NUM_KV_HEADS, HEAD_SIZE)
    cache.write(0, Places(int32(2, 0), int32(5, 15)), keys, values)
    torch.testing.assert_close(cache.keys[0][2, :, 5], keys[0])
    torch.testing.assert_close(cache.values[0][0, :, 15], values[1])
    for tensor in (*cache.keys, *cache.values):
        tensor[2, :, 5] = tensor[0, :, 15] = 1e4
        assert bool((tensor == 1e4).all())


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "products"])
@pytest.mark.parametrize("overflow", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_numbers_that_overflow_stay_with_their_own_request(overflow: float, is_fused: bool) -> None:
    def attend(query: Tensor, step: PrefillStep | DecodeStep, keys: Tensor, values: Tensor) -> Tensor:
        seen, visible = step.store(0, keys, values), step.visible(0, None)
        if is_fused:
            return attend_fused(query, *seen, visible, 1.0)
        return attend_by_products(query, *seen, NUM_KV_HEADS, visible, 1.0, None)

    cache = new_cache()
    query, keys, values = heads(NUM_HEADS, 8), heads(NUM_KV_HEADS, 8), heads(NUM_KV_HEADS, 8)
    keys[:, :, :4] = values[:, :, :4] = overflow
    output = attend(query, prefill_step(cache, (0, 4), (1, 4)), keys, values)
    assert output[:, 4:].isfinite().all(), "the neighbour in the same prefill"

    step_after = DecodeStep(cache, Places(int32(*range(NUM_SLOTS)), int32(0, 0, 0)), context_len=MAX_LEN)
    query, keys, values = (heads(count, 1, NUM_SLOTS) for count in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    output = attend(query, step_after, keys, values)
    assert output.isfinite().all(), "the next request in the slot"


def test_cache_writes_heads_side_by_side() -> None:
    shape = (NUM_SLOTS, 1, MAX_LEN, NUM_KV_HEADS * HEAD_SIZE)
    cache = StaticCacheXla([torch.zeros(shape)], [torch.zeros(shape)], MAX_LEN)
    keys, values = heads(NUM_KV_HEADS, 1, 1)[:, :, 0], heads(NUM_KV_HEADS, 1, 1)[:, :, 0]
    cache.write(0, Places(int32(2), int32(5)), keys, values)
    torch.testing.assert_close(cache.keys[0][2, 0, 5], keys.reshape(-1))
    torch.testing.assert_close(cache.values[0][2, 0, 5], values.reshape(-1))
