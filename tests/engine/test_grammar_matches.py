"""What a mask allows always leads to a text that matches."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from tests.engine.grammars import walk
from tpu_tgi_server.engine.grammar import GrammarCompiler
from tpu_tgi_server.engine.tokenizer import Tokenizer, load_tokenizer
from tpu_tgi_server.engine.types import GrammarType

DEMO_FOLDER = Path(__file__).parents[2] / ".cache" / "SmolLM2-135M-Instruct"

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


@pytest.fixture(scope="module")
def demo_tokenizer() -> Tokenizer:
    if not DEMO_FOLDER.exists():
        pytest.skip("no demo model")
    return load_tokenizer(DEMO_FOLDER)


@pytest.fixture(scope="module")
def demo_compiler(demo_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer, 49152)


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
