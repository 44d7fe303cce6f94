"""A grammar on its way through a request: masks, ends, failures."""

import random
import re

import numpy as np
import pytest
from llguidance import LLParserLimits

from tests.engine.grammars import NUM_TRAINED, VOCAB_SIZE, allowed, say, walk
from tpu_tgi_server.engine.grammar import Grammar, GrammarCompiler
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import GrammarType


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
