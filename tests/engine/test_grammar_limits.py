"""Grammars that are refused, the deadline of their compilation, and those that are kept."""

import json
import threading
import time

import pytest

from tests.engine.grammars import VOCAB_SIZE, allowed, say
from tpu_tgi_server.engine.grammar import MAX_CACHED_GRAMMARS, MAX_COMPILING, GrammarCompiler
from tpu_tgi_server.engine.grammar_text import MAX_GRAMMAR_BYTES
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import EngineError, ErrorKind, GrammarType

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
