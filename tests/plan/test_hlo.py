"""What is read from modules in XLA's text form."""

from tpu_tgi_server.plan import hlo

AFTER = """HloModule m, input_output_alias={ {1}: (3, {}, may-alias), {2}: (11, {}, must-alias) }

%fused (p: bf16[8,16]) -> bf16[8,16] {
  ROOT %copy.9 = bf16[8,16]{1,0} copy(%p)
}

ENTRY %main (p: bf16[8,16]) -> bf16[8,16] {
  %copy.1 = bf16[8,16]{1,0:T(8,128)(2,1)S(1)} copy(%p)
  %copy.2 = f32[4,32]{1,0:T(8,128)} copy(%p)
  %convert.3 = f32[8,16]{1,0:T(8,128)} convert(%p)
  %copy.4 = f32[8,8]{1,0:T(8,128)} copy(%p)
  ROOT %transpose.5 = bf16[16,8]{0,1:T(8,128)} transpose(%p), dimensions={1,0}
}
"""


def test_aliased_buffers_are_counted() -> None:
    assert hlo.num_aliased(AFTER) == 2


def test_copies_in_main_memory_are_counted_whatever_their_shape_and_dtype() -> None:
    assert hlo.num_copies(AFTER, {128}) == 3


EXCHANGES = """HloModule m

%async (p: bf16[8,128]) -> bf16[8,512] {
  ROOT %all-gather.1 = bf16[8,512]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=3, dimensions={1}
}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %all-gather.2 = bf16[8,512]{1,0} all-gather(%p), channel_id=3, dimensions={1}
  %all-reduce.1 = (bf16[8,64]{1,0:T(8,128)(2,1)}, f32[8]{0}) all-reduce(%a, %b), channel_id=1, to_apply=%add
  %all-reduce.2 = f32[8,64]{1,0} all-reduce-start(%a), channel_id=2, to_apply=%add
  %done = f32[8,64]{1,0} all-reduce-done(%all-reduce.2)
  ROOT %move = (bf16[8,64]{1,0}, bf16[8,64]{1,0}, u32[], u32[]) collective-permute-start(%p), channel_id=4
}
"""


def test_exchanges_are_counted_once_however_many_pieces_they_are_in() -> None:
    counts, num_bytes = hlo.collectives(EXCHANGES)
    assert counts == {"all-gather": 1, "all-reduce": 2, "collective-permute": 1}
    assert num_bytes == {
        "all-gather": 8 * 512 * 2,
        "all-reduce": 8 * 64 * 2 + 8 * 4 + 8 * 64 * 4,
        "collective-permute": 8 * 64 * 2,
    }


def test_a_module_for_one_core_has_no_exchanges() -> None:
    assert hlo.collectives(AFTER) == ({}, {})
