"""Special tokens around prompts, truncation, and which ids end an answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from tests.tiny_model import BOS, EOS, byte_level_tokenizer
from tpu_tgi_server.engine.tokenizer import Tokenizer, load_tokenizer

BOS_ID, EOS_ID = 0, 1


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, 0, add_special_tokens=False)


def test_bos_is_added_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("xyz", 0, None) == [BOS_ID, *letters(tokenizer, "xyz")]


def test_bos_is_not_added_to_text_that_starts_with_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"{BOS}xyz", 0, None) == [BOS_ID, *letters(tokenizer, "xyz")]


def test_add_special_tokens_decides_if_it_is_given(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("xyz", 0, False) == letters(tokenizer, "xyz")
    assert tokenizer.encode(f"{BOS}xyz", 0, True)[:2] == [BOS_ID, BOS_ID]


@pytest.mark.parametrize("truncate", [1, 2, 3, 4])
def test_truncation_keeps_bos_and_the_right_end_as_the_tokenizers_library_does(
    tokenizer: Tokenizer, truncate: int
) -> None:
    peer = byte_level_tokenizer()
    peer.truncation_side = "left"
    expected = peer.encode("vwxyz", truncation=True, max_length=truncate)
    assert tokenizer.encode("vwxyz", truncate, None) == expected
    assert len(expected) == truncate


@pytest.mark.parametrize("truncate", [0, 6, 7, 1000])
def test_truncation_beyond_the_length_changes_nothing(tokenizer: Tokenizer, truncate: int) -> None:
    assert tokenizer.encode("vwxyz", truncate, None) == tokenizer.encode("vwxyz", 0, None)


def test_truncation_without_special_tokens_keeps_the_right_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("vwxyz", 2, False) == letters(tokenizer, "yz")


def test_truncation_of_text_with_its_own_bos_keeps_the_right_end(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(f"{BOS}vwxyz", 3, None) == letters(tokenizer, "xyz")


def test_tokenizer_without_special_tokens_works() -> None:
    plain = byte_level_tokenizer()
    plain.bos_token = plain.eos_token = None
    tokenizer = Tokenizer(plain)
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.encode("xyz", 0, None)[1:] == letters(tokenizer, "xyz")


def saved_tokenizer(folder: Path, generation_config: dict[str, Any]) -> Tokenizer:
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("generation_config", "eos_ids"),
    [
        ({"eos_token_id": None}, {EOS_ID}),
        ({}, {EOS_ID}),
        ({"eos_token_id": 7}, {7, EOS_ID}),
        ({"eos_token_id": [7, 9]}, {7, 9, EOS_ID}),
    ],
)
def test_end_ids_are_those_of_generation_config_and_tokenizer(
    tmp_path: Path, generation_config: dict[str, Any], eos_ids: set[int]
) -> None:
    assert saved_tokenizer(tmp_path, generation_config).eos_ids == eos_ids


def test_decoding_keeps_the_text_as_it_stands(tokenizer: Tokenizer) -> None:
    """No spaces are cleaned up in front of punctuation."""
    text = f"a , b ! it 's{EOS}"
    assert tokenizer.decode(letters(tokenizer, text)) == text


def test_ids_that_only_the_model_has_are_no_text_with_any_kind_of_tokenizer() -> None:
    for tokenizer in (Tokenizer(ByT5Tokenizer()), Tokenizer(byte_level_tokenizer())):
        ids = tokenizer.encode("ab", 0, add_special_tokens=False)
        assert tokenizer.decode([*ids, tokenizer.num_ids, 10**6]) == "ab"
        assert tokenizer.decode([tokenizer.num_ids]) == ""
