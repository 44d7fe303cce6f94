"""Grammars as clients write them, in the words of llguidance.

Owns what is accepted, and the sentence that says why something is not.
"""

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llguidance import regex_to_lark

from tpu_tgi_server.engine.types import EngineError, ErrorKind, GrammarType

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_MULTIPLE_OF = 10_000
"""Largest least common multiple of a schema's `multipleOf` values. llguidance builds an automaton of about so many
states before any limit of its own applies: 9,973 took 42 ms and 9,999,991 took 222 s and 5 GB (llguidance 1.9.1)."""

# Forcing would allow only the canonical tokens where the text is certain, and tokenise all that is certain each step:
# 0.6 s for a{1000000} (llguidance 1.9.1).
_HEADER = '%llguidance {"no_forcing": true}\nstart: '
# what \d, \w and \s are at least (ASCII, as in TGI) and at most (Unicode, as in Python's re)
_NARROW = {"d": "0-9", "w": "0-9a-zA-Z_", "s": r" \t\n\r\f\v"}
_WIDE = {"d": r"\d", "w": r"\w\p{N}", "s": r"\s\x1c-\x1f"}
_CLASS_SYNTAX = re.compile(r"\\.|\[\^?\]?|\]", re.DOTALL)
_POSITION = re.compile(r"^at \d+\(\d+\): ")


def to_lark(grammar: str, grammar_type: GrammarType) -> str:
    """A grammar in llguidance's variant of Lark.

    Raises:
        EngineError: INVALID, for what can be refused without compiling.
    """
    num_bytes = len(grammar.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise refused(f"it has {num_bytes} bytes, more than {MAX_GRAMMAR_BYTES}")
    if grammar_type == GrammarType.REGEX:
        return _HEADER + _regex(grammar)
    if grammar_type == GrammarType.JSON:
        return _HEADER + _json_schema(grammar)
    raise refused("its type must be JSON or REGEX")


def refused(reason: str) -> EngineError:
    """The refusal of a grammar."""
    return EngineError(ErrorKind.INVALID, f"grammar is not accepted: {reason}")


def explained(error: str) -> str:
    """One line out of an error of llguidance, which draws pictures over many."""
    if error.startswith("NoExtension"):
        return "no text matches it"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = causes[0] if causes else lines[0]
    return _POSITION.sub("", line).removeprefix("failed to compile JSON schema: ")[:200]


def _regex(grammar: str) -> str:
    if not grammar:
        raise refused("it is empty")
    try:
        return f"/{regex_to_lark(_narrowed(grammar), '')}/\n"
    except ValueError as error:
        raise refused(str(error)) from error


def _narrowed(regex: str) -> str:
    """The regex with \\d, \\w, \\s and their opposites spelt out, so that its texts match whoever reads these classes.

    What is wanted is spelt narrow, and what is excluded wide.
    """
    is_excluding: list[bool] = []  # for each bracket that is open

    def spelt(match: re.Match[str]) -> str:
        part = match[0]
        inside = bool(is_excluding)
        excluding = inside and is_excluding[-1]
        if part == "]":
            if inside:
                is_excluding.pop()
        elif part.startswith("["):
            is_excluding.append(excluding != part.startswith("[^"))
        elif part[1] in _NARROW:
            members = (_WIDE if excluding else _NARROW)[part[1]]
            return members if inside else f"[{members}]"
        elif part[1].lower() in _NARROW:
            return f"[^{(_NARROW if excluding else _WIDE)[part[1].lower()]}]"
        return part

    return _CLASS_SYNTAX.sub(spelt, regex)


def _json_schema(grammar: str) -> str:
    try:
        schema = json.loads(grammar)
    except (ValueError, RecursionError) as error:
        raise refused(f"it is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refused("a JSON schema is an object or true")
    try:
        multiple = math.lcm(*_multiples(schema))
    except (ArithmeticError, ValueError) as error:
        raise refused("multipleOf is not a number") from error
    if multiple > MAX_MULTIPLE_OF:
        raise refused(f"its multipleOf values have a common multiple above {MAX_MULTIPLE_OF}")
    # as in TGI, at most one space where JSON allows white space: a model cannot fill an answer with it
    options = {"whitespace_pattern": "[ ]?", "lenient": False}
    return f"%json {json.dumps(schema | {'x-guidance': options})}\n"


def _multiples(schema: Any) -> Iterator[int]:
    """Every multipleOf of a schema, without its decimal point."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            step = value.get("multipleOf")
            if isinstance(step, int | float) and step != 0:
                sign, digits, exponent = Decimal(repr(step)).as_tuple()
                yield int(Decimal((sign, digits, max(int(exponent), 0))))
            pending += value.values()
        elif isinstance(value, list):
            pending += value
