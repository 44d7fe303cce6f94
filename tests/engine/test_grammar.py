"""Constrained decoding: what a mask allows always leads to a text that matches."""

import json
import random
import re
import threading
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tpu_tgi_server.engine.grammar import MAX_CACHED_GRAMMARS, MAX_COMPILING, Grammar, GrammarCompiler, GrammarState
from tpu_tgi_server.engine.grammar_text import MAX_GRAMMAR_BYTES
from tpu_tgi_server.engine.tokenizer import Tokenizer, load_tokenizer
from tpu_tgi_server.engine.types import EngineError, ErrorKind, GrammarType

DEMO_FOLDER = Path(__file__).parents[2] / ".cache" / "SmolLM2-135M-Instruct"
NUM_TRAINED = 400
VOCAB_SIZE = NUM_TRAINED + 37
"""Of the model: more than the tokenizer has, and no multiple of 32."""

REGEXES = [
    "[0-9]{3}",
    r"\d{4}-\d{2}-\d{2}",
    "yes|no|maybe",
    "(abc)+",
    "a?b?c?",
    "[a-z]{2,8}@[a-z]{2,8}\\.(com|org)",
    r"\w{1,12}",
    r"-?(0|[1-9][0-9]{0,5})(\.[0-9]{1,4})?",
    "[가-힣]{2,6}",
    "(😀|🎉|한국어){1,3}",
    "(?i)true|false",
    "^anchored$",
    r"\s{1,3}x",
    r'"([^"\\\x00-\x1F]|\\["\\]){0,10}"',
    "(a|b)*a(a|b){6}",
    r"\{[ ]?\"n\"[ ]?:[ ]?(0|[1-9][0-9]{0,6})[ ]?\}",
    ".{5}",
    "[^a-z]{1,5}",
    r"a/b\\c|//|\n",
    "(<\\|end\\|>|<){1,2}",
]

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
SCHEMAS: list[dict[str, object] | bool] = [
    {"type": "integer"},
    {"type": "number", "minimum": 0, "maximum": 10},
    {"type": "integer", "minimum": -5, "maximum": 150},
    {"type": "integer", "multipleOf": 7, "maximum": 1000, "minimum": 0},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "string", "maxLength": 8},
    {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[가-힣]+$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"enum": ["red", "green", 3, None, {"a": [1]}]},
    {"const": {"deep": ["😀", True]}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2},
    POINT | {"additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}, POINT | {"additionalProperties": False}]},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        },
        "required": ["name"],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 9}]},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "integer"}}, "additionalProperties": False},
]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE with two EOS ids and one more special token."""
    bpe = FastTokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=NUM_TRAINED,
        special_tokens=["<|end|>", "<|turn|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ["true false null", '{"name": "x", "y": [1, 2]}', "한국어 가나다", "2024-01-31", "yes no maybe abcabc"]
    bpe.train_from_iterator(words * 20, trainer)
    bpe.add_special_tokens([AddedToken("<|start|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>")
    (turn_id,) = fast.encode("<|turn|>")
    return Tokenizer(fast, generation_eos_ids=[turn_id])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    if not DEMO_FOLDER.exists():
        pytest.skip("no demo model")
    return load_tokenizer(DEMO_FOLDER)


@pytest.fixture(scope="module")
def demo_compiler(demo_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer, 49152)


def allowed(state: GrammarState) -> list[int]:
    bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
    return [int(id) for id in np.flatnonzero(bits)]


def walk(state: GrammarState, eos_ids: frozenset[int], seed: int, max_tokens: int = 400) -> list[int]:
    """Random tokens until the grammar is finished, without EOS. Long walks take EOS as soon as they may."""
    rng = random.Random(seed)
    ids: list[int] = []
    while not state.is_finished:
        choices = allowed(state)
        assert choices, "nothing is allowed"
        ends = [id for id in choices if id in eos_ids]
        token_id = rng.choice(ends if ends and len(ids) > 40 else choices)
        state.advance(token_id)
        if token_id not in eos_ids:
            ids.append(token_id)
        assert len(ids) < max_tokens, "the walk does not end"
    assert state.failure is None
    return ids


def say(state: GrammarState, tokenizer: Tokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text, truncate=0, add_special_tokens=False):
        state.advance(token_id)


def check_regex(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str, num_walks: int) -> None:
    grammar = compiler.compile(pattern, GrammarType.REGEX)
    for seed in range(num_walks):
        text = tokenizer.decode(walk(grammar.start(), tokenizer.eos_ids, seed))
        assert re.fullmatch(pattern, text), text


def check_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: object, num_walks: int) -> None:
    grammar = compiler.compile(json.dumps(schema), GrammarType.JSON)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())  # type: ignore[arg-type]
    for seed in range(num_walks):
        text = tokenizer.decode(walk(grammar.start(), tokenizer.eos_ids, seed))
        validator.validate(json.loads(text))


@pytest.mark.parametrize("pattern", REGEXES)
def test_random_tokens_under_a_regex_match_it(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str):
    check_regex(compiler, tokenizer, pattern, num_walks=8)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_random_tokens_under_a_schema_satisfy_it(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: object):
    check_schema(compiler, tokenizer, schema, num_walks=8)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\S{4}",
        r"\D{4}",
        r"\W{4}",
        r"[^\s,]{4}",
        r"[^\w\d]{4}",
        r"[\S]{4}",
        r"[^\W_]{4}",
        r"[^\S ]{4}",
        r"[]\d]{4}",
        r"\\d\d\w",
    ],
)
def test_character_classes_match_whether_they_are_read_as_ascii_or_unicode(
    compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str
):
    grammar = compiler.compile(pattern, GrammarType.REGEX)
    for seed in range(30):
        text = tokenizer.decode(walk(grammar.start(), tokenizer.eos_ids, seed))
        assert re.fullmatch(pattern, text), text
        assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.demo
@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes_hold_with_the_demo_tokenizer(demo_compiler: GrammarCompiler, demo_tokenizer: Tokenizer, pattern: str):
    check_regex(demo_compiler, demo_tokenizer, pattern, num_walks=3)


@pytest.mark.demo
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_schemas_hold_with_the_demo_tokenizer(
    demo_compiler: GrammarCompiler, demo_tokenizer: Tokenizer, schema: object
):
    check_schema(demo_compiler, demo_tokenizer, schema, num_walks=3)


MANY_OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}


@pytest.mark.parametrize(
    ("grammar", "grammar_type", "reason"),
    [
        ("(", GrammarType.REGEX, "unclosed group"),
        ("", GrammarType.REGEX, "empty"),
        ("(?=a)b", GrammarType.REGEX, "look-around"),
        (r"(a)\1", GrammarType.REGEX, "backreferences"),
        (r"[^\s\S]", GrammarType.REGEX, "no text matches"),
        ("(" * 5000 + ")" * 5000, GrammarType.REGEX, "nested"),
        ("\ud800", GrammarType.REGEX, "surrogates"),
        ("a" * (MAX_GRAMMAR_BYTES + 1), GrammarType.REGEX, "bytes"),
        ("{not json", GrammarType.JSON, "not JSON"),
        ("", GrammarType.JSON, "not JSON"),
        ("[" * 5000, GrammarType.JSON, "not JSON"),
        ("[1]", GrammarType.JSON, "object"),
        ("false", GrammarType.JSON, "object"),
        ('{"not": {"type": "string"}}', GrammarType.JSON, "not"),
        ('{"type": "array", "uniqueItems": true}', GrammarType.JSON, "uniqueItems"),
        ('{"type": "strin"}', GrammarType.JSON, "strin"),
        ('{"$ref": "#"}', GrammarType.JSON, "no text matches"),
        ('{"$ref": "http://127.0.0.1:9/schema"}', GrammarType.JSON, "not present"),
        ('{"type": "string", "pattern": "("}', GrammarType.JSON, "unclosed group"),
        ('{"type": "integer", "multipleOf": 9999991}', GrammarType.JSON, "multipleOf"),
        ('{"multipleOf": 0, "items": {"multipleOf": 9999991}}', GrammarType.JSON, "multipleOf"),
        ('{"multipleOf": 1e999}', GrammarType.JSON, "multipleOf"),
        (json.dumps({"allOf": [{"multipleOf": p} for p in (7, 11, 13, 17, 19)]}), GrammarType.JSON, "multipleOf"),
        (json.dumps(MANY_OPTIONAL), GrammarType.JSON, ""),
        ("[0-9]", GrammarType.NONE, "type"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_and_heavy_grammars_are_refused_soon(
    compiler: GrammarCompiler, grammar: str, grammar_type: GrammarType, reason: str
):
    start = time.monotonic()
    with pytest.raises(EngineError) as refusal:
        compiler.compile(grammar, grammar_type)
    assert time.monotonic() - start < 4
    assert refusal.value.kind is ErrorKind.INVALID
    assert "grammar" in refusal.value.message
    assert reason in refusal.value.message
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 400


def test_compiling_has_a_deadline(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    monkeypatch.setattr("tpu_tgi_server.engine.grammar.MAX_COMPILE_SECONDS", 0.0)
    with pytest.raises(EngineError, match="seconds"):
        compiler.compile("|".join(f"word{i}" for i in range(5_000)), GrammarType.REGEX)


def test_a_mask_is_one_bit_for_each_logit_and_none_beyond(tokenizer: Tokenizer):
    for vocab_size in (VOCAB_SIZE, NUM_TRAINED, NUM_TRAINED - 29):
        mask = GrammarCompiler(tokenizer, vocab_size).compile("(.|\n)*", GrammarType.REGEX).start().mask()
        assert mask.dtype == np.int32
        assert mask.shape == (-(-vocab_size // 32),)
        set_ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert set_ids.max() < min(vocab_size, NUM_TRAINED)


def test_every_eos_is_allowed_exactly_where_the_text_may_end(compiler: GrammarCompiler, tokenizer: Tokenizer):
    assert len(tokenizer.eos_ids) == 2
    state = compiler.compile("ab*", GrammarType.REGEX).start()
    assert not tokenizer.eos_ids.intersection(allowed(state))
    say(state, tokenizer, "a")
    assert tokenizer.eos_ids.issubset(allowed(state))
    assert not state.is_finished


def test_runaway_compilations_cannot_pile_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    monkeypatch.setattr("tpu_tgi_server.engine.grammar.MAX_COMPILE_SECONDS", 0.2)
    num_threads = threading.active_count()
    for count in range(5):
        with pytest.raises(EngineError):
            compiler.compile(".*" * (3000 + count), GrammarType.REGEX)
    assert threading.active_count() <= num_threads + 2 * MAX_COMPILING, (
        "those that compile, and those that wait for them"
    )


@pytest.mark.parametrize("which", [0, 1])
def test_taking_any_eos_finishes_the_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer, which: int):
    state = compiler.compile("ab*", GrammarType.REGEX).start()
    say(state, tokenizer, "abb")
    state.advance(sorted(tokenizer.eos_ids)[which])
    assert state.is_finished
    assert set(allowed(state)) == tokenizer.eos_ids


def test_a_full_match_that_cannot_go_on_is_finished_and_allows_only_eos(
    compiler: GrammarCompiler, tokenizer: Tokenizer
):
    state = compiler.compile("[0-9]{3}", GrammarType.REGEX).start()
    for digit in "42":
        say(state, tokenizer, digit)
        assert not state.is_finished
    say(state, tokenizer, "7")
    assert state.is_finished
    assert set(allowed(state)) == tokenizer.eos_ids
    state.advance(min(tokenizer.eos_ids))
    assert state.is_finished


def test_special_tokens_are_never_allowed_as_text(compiler: GrammarCompiler, tokenizer: Tokenizer):
    state = compiler.compile(r"(.|\n)*<\|start\|>(.|\n)*", GrammarType.REGEX).start()
    assert not tokenizer.special_ids.intersection(allowed(state))
    for character in "<|start|>":
        say(state, tokenizer, character)
    assert tokenizer.special_ids.intersection(allowed(state)) == tokenizer.eos_ids


def test_a_token_that_the_mask_forbids_is_a_bug_of_the_caller(compiler: GrammarCompiler, tokenizer: Tokenizer):
    state = compiler.compile("[0-9]{3}", GrammarType.REGEX).start()
    (letter,) = tokenizer.encode("a", 0, False)
    for token_id in (letter, VOCAB_SIZE, 10**6, -1, min(tokenizer.eos_ids)):
        with pytest.raises(RuntimeError, match="forbidden"):
            state.advance(token_id)
    say(state, tokenizer, "123")
    assert state.is_finished


def test_requests_with_the_same_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer):
    grammar = compiler.compile("[0-9]{2}x|[a-f]{3}", GrammarType.REGEX)
    first, second = grammar.start(), grammar.start()
    say(first, tokenizer, "1")
    assert allowed(second) == allowed(grammar.start())
    say(second, tokenizer, "a")
    say(first, tokenizer, "2")
    say(second, tokenizer, "b")
    say(first, tokenizer, "x")
    say(second, tokenizer, "c")
    assert first.is_finished
    assert second.is_finished


def test_a_request_goes_on_when_others_used_up_the_limit_of_the_shared_lexer(tokenizer: Tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    compiler._limits = LLParserLimits(max_lexer_states=150, verbose_errors=False)
    pattern = r"([a-z]{1,300}[^a-z]){1,9}"
    grammar = compiler.compile(pattern, GrammarType.REGEX)
    used: list[Grammar] = []
    for seed in range(20):
        pristine = grammar._pristine
        text = tokenizer.decode(walk(grammar.start(), tokenizer.eos_ids, seed, 3000))
        assert re.fullmatch(pattern, text)
        used += [grammar] if grammar._pristine is not pristine else []
    assert used, "the limit was never hit: the test does not test"


def test_a_grammar_that_cannot_be_followed_ends_its_request_and_says_why(tokenizer: Tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    compiler._limits = LLParserLimits(max_lexer_states=50, verbose_errors=False)
    state = compiler.compile(r"([a-z]{1,300}[^a-z]){1,9}", GrammarType.REGEX).start()
    rng = random.Random(0)
    while not state.is_finished:
        state.advance(rng.choice(allowed(state)))
    assert state.failure
    assert "states" in state.failure
    assert set(allowed(state)) == tokenizer.eos_ids


def test_a_model_that_lacks_the_next_token_ends_its_request_and_says_why(tokenizer: Tokenizer):
    (first_id, second_id) = (tokenizer.encode(letter, 0, False)[0] for letter in "ab")
    assert first_id < second_id
    compiler = GrammarCompiler(tokenizer, vocab_size=second_id)
    state = compiler.compile("ab", GrammarType.REGEX).start()
    state.advance(first_id)
    assert state.is_finished
    assert state.failure == "the model has no token that goes on"


def test_the_cache_returns_the_same_grammar_and_is_bounded(tokenizer: Tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    first = compiler.compile("a{1}", GrammarType.REGEX)
    second = compiler.compile("a{2}", GrammarType.REGEX)
    for count in range(3, MAX_CACHED_GRAMMARS + 2):
        assert compiler.compile("a{1}", GrammarType.REGEX) is first
        compiler.compile(f"a{{{count}}}", GrammarType.REGEX)
    assert len(compiler._cache) == MAX_CACHED_GRAMMARS
    assert compiler.compile("a{1}", GrammarType.REGEX) is first
    assert compiler.compile("a{2}", GrammarType.REGEX) is not second


def test_more_grammars_at_once_than_the_cache_holds_are_all_kept(tokenizer: Tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE)
    sources = [(f"a{{{count}}}", GrammarType.REGEX) for count in range(1, MAX_CACHED_GRAMMARS + 5)]
    grammars = [compiling.result() for compiling in compiler.begin(sources)]
    assert [compiler.compile(*source) for source in sources[-MAX_CACHED_GRAMMARS:]] == grammars[-MAX_CACHED_GRAMMARS:]
    assert [compiling.result() for compiling in compiler.begin(sources)][-1] is grammars[-1]


def test_a_refused_grammar_is_tried_again_when_it_comes_again(compiler: GrammarCompiler):
    for _ in range(2):
        (compiling,) = compiler.begin([("(", GrammarType.REGEX)])
        with pytest.raises(EngineError):
            compiler.compile("(", GrammarType.REGEX)
        assert compiling.done()
        assert compiler.begin([("(", GrammarType.REGEX)]) != [compiling]


def test_the_same_text_as_json_and_as_regex_are_two_grammars(compiler: GrammarCompiler, tokenizer: Tokenizer):
    text = "true"
    state = compiler.compile(text, GrammarType.REGEX).start()
    say(state, tokenizer, "true")
    assert state.is_finished
    assert compiler.compile(text, GrammarType.JSON) is not compiler.compile(text, GrammarType.REGEX)


def test_a_schema_cannot_change_the_options(compiler: GrammarCompiler, tokenizer: Tokenizer):
    schema = {"type": "array", "items": {"const": 1}, "x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}}
    state = compiler.compile(json.dumps(schema), GrammarType.JSON).start()
    say(state, tokenizer, "[ ")
    (space,) = tokenizer.encode(" ", 0, False)
    assert space not in allowed(state)
