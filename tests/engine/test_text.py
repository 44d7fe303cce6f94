"""Streamed texts join to the text of all ids, for tokenizers of both kinds, and never break a character."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tests.driver import Answer, new_request
from tests.engine.scripted_driver import ScriptedDriver
from tests.tiny_model import BOS, EOS, byte_level_tokenizer
from tpu_tgi_server.engine.text import TextStream
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

TEXTS = [
    "plain words and then some",
    "🙂🙃👩‍👩‍👧‍👦 family",
    "안녕하세요 세계",
    "漢字かな交じり文",
    "mixed: é🙂안 end",
    "  two  spaces\n\nand lines\t",
]


def raw_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def answer_with(tokenizer: Any, prompt: str, ids: list[int], **fields: Any) -> Answer:
    """The answer to a prompt whose script is `ids`."""
    engine_tokenizer = Tokenizer(tokenizer)
    key = tuple(engine_tokenizer.encode(prompt, 0, None))
    driver = ScriptedDriver(script={key: ids}, tokenizer=engine_tokenizer)
    (answer,) = driver.run(1, new_request(1, prompt, new=len(ids), **fields))
    assert answer.ids == ids
    return answer


def end_of(answer: Answer) -> pb.GeneratedText:
    assert answer.end is not None
    return answer.end


def metaspace_tokenizer() -> Any:
    """Unigram pieces with SentencePiece's visible space, which goes in front of the first word too."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "world", "!", "▁A", "A", "▁is", "s"]
    tokenizer = FastTokenizer(models.Unigram([(piece, -float(rank)) for rank, piece in enumerate(pieces)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["x", "안", "trailing space "])
def test_byte_level_texts_join_to_the_whole_without_broken_characters(prompt: str, text: str) -> None:
    tokenizer = byte_level_tokenizer()
    answer = answer_with(tokenizer, prompt, raw_ids(tokenizer, text))
    assert "".join(answer.texts) == text == end_of(answer).text
    assert "\ufffd" not in "".join(answer.texts)


def test_character_comes_with_the_token_that_completes_it() -> None:
    tokenizer = byte_level_tokenizer()
    answer = answer_with(tokenizer, "x", raw_ids(tokenizer, "é🙂!"))
    assert answer.texts == ["", "é", "", "", "", "🙂", "!"]


def test_unfinished_character_is_not_lost_at_the_end() -> None:
    """The last token leaves two bytes of four: what there is comes out, as the tokenizer shows it."""
    tokenizer = byte_level_tokenizer()
    ids = raw_ids(tokenizer, "a🙂")[:3]
    answer = answer_with(tokenizer, "x", ids)
    assert "".join(answer.texts) == end_of(answer).text == tokenizer.decode(ids)
    assert answer.texts[-1].endswith("\ufffd")


def test_invalid_bytes_do_not_hold_the_text_back_for_ever() -> None:
    tokenizer = byte_level_tokenizer()
    broken = raw_ids(tokenizer, "é")[1:]
    ids = [*broken, *raw_ids(tokenizer, "ab")]
    answer = answer_with(tokenizer, "x", ids)
    assert "".join(answer.texts) == "\ufffdab"
    assert answer.texts[-1] == "b"


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        (["▁Hello", "▁world", "!"], [" Hello", " world", "!"]),
        (["▁", "world"], [" ", "world"]),
        (["world", "▁is", "▁A"], ["world", " is", " A"]),
        (["!", "s", "▁Hello"], ["!", "s", " Hello"]),
    ],
)
def test_metaspace_pieces_keep_their_spaces(pieces: list[str], texts: list[str]) -> None:
    tokenizer = metaspace_tokenizer()
    answer = answer_with(tokenizer, "A", tokenizer.convert_tokens_to_ids(pieces))
    assert "".join(answer.texts) == "".join(texts) == end_of(answer).text
    assert answer.texts == texts


def test_special_tokens_are_flagged_and_left_out_of_the_generated_text() -> None:
    """`<|added|>` is special in the tokenizer itself, but not among all_special_ids."""
    tokenizer = byte_level_tokenizer()
    tokenizer._tokenizer.add_special_tokens([AddedToken("<|added|>", special=True)])
    added = tokenizer.convert_tokens_to_ids("<|added|>")
    assert added not in tokenizer.all_special_ids
    ids = [*raw_ids(tokenizer, "a"), tokenizer.bos_token_id, added, *raw_ids(tokenizer, "b"), tokenizer.eos_token_id]
    answer = answer_with(tokenizer, "x", ids)
    assert answer.is_special == [False, True, True, False, True]
    assert answer.texts == ["a", BOS, "<|added|>", "b", EOS]
    assert end_of(answer).text == "ab"


def test_ordinary_added_token_is_text() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer._tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    answer = answer_with(tokenizer, "x", [tokenizer.convert_tokens_to_ids("<tool>")])
    assert (answer.is_special, answer.texts, end_of(answer).text) == ([False], ["<tool>"], "<tool>")


def test_end_token_ends_with_reason_eos_also_at_the_last_allowed_token() -> None:
    tokenizer = byte_level_tokenizer()
    ids = [*raw_ids(tokenizer, "ab"), tokenizer.eos_token_id]
    answer = answer_with(tokenizer, "x", ids, ignore_eos=False)
    assert end_of(answer).finish_reason == pb.FINISH_REASON_EOS_TOKEN
    assert end_of(answer).text == "ab"


def test_every_end_id_of_the_generation_config_ends() -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), generation_eos_ids=(50, 60))
    key = tuple(tokenizer.encode("x", 0, None))
    for end_id in (50, 60, 1):
        driver = ScriptedDriver(script={key: [70, end_id, 70]}, tokenizer=tokenizer)
        stopped, ignoring = driver.run(1, new_request(1, "x", 3, ignore_eos=False), new_request(2, "x", 3))
        assert (stopped.ids, ignoring.ids) == ([70, end_id], [70, end_id, 70])
        assert end_of(stopped).finish_reason == pb.FINISH_REASON_EOS_TOKEN
        assert end_of(ignoring).finish_reason == pb.FINISH_REASON_LENGTH


def test_last_piece_is_never_lost() -> None:
    """50 requests of one to three tokens, in batches of five on four slots."""
    driver = ScriptedDriver()
    tokenizer = byte_level_tokenizer()
    requests = [new_request(id, f"request {id}", new=1 + id % 3) for id in range(50)]
    for start in range(0, 50, 5):
        driver.run(start, *requests[start : start + 5])
    for request in requests:
        answer = driver.answers[request.id]
        assert len(answer.ids) == 1 + request.id % 3 == end_of(answer).generated_tokens
        assert "".join(answer.texts) == end_of(answer).text == tokenizer.decode(answer.ids)


@pytest.mark.parametrize("prompt", ["A", "A ", "  a", "trailing ", "안녕", "a\n"])
@pytest.mark.parametrize("make_tokenizer", [byte_level_tokenizer, metaspace_tokenizer])
def test_generated_text_never_starts_with_the_prompt(make_tokenizer: Any, prompt: str) -> None:
    tokenizer = make_tokenizer()
    answer = answer_with(tokenizer, prompt, raw_ids(tokenizer, "Hello world!")[-3:])
    assert end_of(answer).text == "".join(answer.texts)
    assert not end_of(answer).text.startswith(prompt)
    assert end_of(answer).text.endswith("!")


def test_pushing_costs_the_same_at_every_length() -> None:
    """Only a short window is decoded for a piece, not the text so far."""
    lengths = []

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            lengths.append(len(ids))
            return super().decode(ids)

    stream = TextStream(Counting(byte_level_tokenizer()), list(range(40, 90)))
    for _ in range(200):
        stream.push(70)
    assert max(lengths) <= 6


def byte_fallback_tokenizer() -> Any:
    """As Llama 2's: bytes are pieces of their own, and the space in front of a text is stripped when decoding."""
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁Hello", "▁A", "A", "!"]
    model = models.Unigram([(piece, -float(rank)) for rank, piece in enumerate(pieces)], unk_id=0, byte_fallback=True)
    tokenizer = FastTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("text", [" Hello 🙂!", "안녕 A", "!"])
def test_byte_fallback_texts_join_to_the_whole(text: str) -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.encode(f"A{text}", add_special_tokens=False)[1:]
    answer = answer_with(tokenizer, "A", ids)
    assert "".join(answer.texts) == text == end_of(answer).text


@pytest.mark.parametrize("make_tokenizer", [metaspace_tokenizer, byte_fallback_tokenizer])
def test_generated_text_is_the_streamed_text_after_a_prompt_of_special_tokens(make_tokenizer: Any) -> None:
    """As after a chat template that ends with a marker."""
    tokenizer = make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["▁Hello", "▁A", "!"])
    answer = answer_with(tokenizer, "<s></s>", ids)
    assert "".join(answer.texts) == end_of(answer).text
