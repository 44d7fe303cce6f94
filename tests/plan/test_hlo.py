"""What is read from modules in XLA's text form."""

import pytest

from tpu_tgi_server.plan import hlo
from tpu_tgi_server.runtime.tracing import module_of

BEFORE = "HloModule m, buffer_donor={ (3, {}), (11, {}) }, entry_computation_layout={(f32[2]{0})->f32[2]{0}}\n"
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


def test_donors_are_read_from_the_header() -> None:
    assert hlo.buffer_donors(BEFORE) == [3, 11]
    assert hlo.buffer_donors("HloModule m, entry_computation_layout={()->f32[2]{0}}\n") == []


def test_aliased_buffers_are_counted() -> None:
    assert hlo.num_aliased(AFTER) == 2


def test_copies_in_main_memory_are_counted_whatever_their_shape_and_dtype() -> None:
    assert hlo.num_copies(AFTER, {128}) == 3


def test_a_module_is_taken_out_of_its_wrapper_only_when_complete() -> None:
    module = bytes(range(200))
    dump = b"\x0a\xc8\x01" + module + b"rest"
    assert module_of(dump) == module
    assert [module_of(dump[:size]) for size in (0, 1, 2, 3, 202)] == [None] * 5
    with pytest.raises(ValueError, match="not an HloProto"):
        module_of(b"\x12\x01a")
