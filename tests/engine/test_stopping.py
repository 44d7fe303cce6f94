"""When a request ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_tgi_server.engine.stopping import StopSequences, finish_reason
from tpu_tgi_server.engine.types import FinishReason


def pieces_until_found(pieces: list[str], *sequences: str) -> int | None:
    stops = StopSequences(sequences)
    return next((number for number, piece in enumerate(pieces, start=1) if stops.found_with(piece)), None)


@pytest.mark.parametrize(
    ("pieces", "sequence", "found"),
    [
        ([" Paris", " is"], "Par", 1),
        ([" Paris", " is"], "Pari", 1),
        ([" Paris", " is"], "ris is", 2),
        (["<", "/", "s>"], "</s>", 3),
        (["foo."], "foo", 1),
        (["foo\n"], "foo", 1),
        (["\n\n"], "\n\n", 1),
        (["\n", "\n"], "\n\n", 2),
        (["j;"], ";", 1),
        (["", "a"], "", 1),
        (["ab", "ac"], "bc", None),
        (["a.b"], "a*b", None),
        (["x" * 500, "y" * 500], "x" * 400 + "y" * 400, 2),
    ],
)
def test_stop_sequence_is_found_across_and_inside_tokens(pieces: list[str], sequence: str, found: int | None) -> None:
    assert pieces_until_found(pieces, sequence) == found


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_found_at_the_first_piece_whose_text_so_far_has_a_stop_sequence(
    pieces: list[str], sequences: list[str]
) -> None:
    texts = ["".join(pieces[:end]) for end in range(1, len(pieces) + 1)]
    wanted = next((n for n, text in enumerate(texts, start=1) if any(s in text for s in sequences)), None)
    assert pieces_until_found(pieces, *sequences) == wanted


def test_length_comes_last() -> None:
    assert finish_reason(True, True, 5, 5) is FinishReason.EOS_TOKEN
    assert finish_reason(False, True, 5, 5) is FinishReason.STOP_SEQUENCE
    assert finish_reason(False, False, 5, 5) is FinishReason.LENGTH
    assert finish_reason(False, False, 4, 5) is None
