"""Constrained decoding: which tokens may come next under a regex or a JSON schema.

Owns compiled grammars and the position of each request in its grammar. Knows nothing of sampling or devices: a mask is
a row of packed bits. What a request says under a grammar is a text that matches, or the beginning of one.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tpu_tgi_server.engine.grammar_text import explained, refused, to_lark
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import GrammarType

MAX_COMPILE_SECONDS = 2.0
MAX_COMPILING = 2
"""Compilations at once, those included that missed their deadline and still run, at up to gigabytes each."""
MAX_CACHED_GRAMMARS = 32
MAX_LEXER_STATES = 100_000
"""Of one compiled grammar with all its requests, at 1 to 2 kilobytes each."""


class GrammarState:
    """Owns the position of one request in its grammar."""

    def __init__(self, grammar: "Grammar") -> None:
        self._grammar = grammar
        self._matcher = grammar.new_matcher()
        self._token_ids: list[int] = []
        self._mask: NDArray[np.int32] | None = None
        self.failure: str | None = None
        """Why the grammar could not be followed to its end (a limit of work or memory), else None."""

    @property
    def is_finished(self) -> bool:
        """Nothing but EOS may follow: the text matches and cannot go on, or EOS was taken, or see `failure`."""
        return self.failure is not None or bool(self._matcher.is_stopped())

    def mask(self) -> NDArray[np.int32]:
        """The tokens that may come next, int32[ceil(V / 32)]: token t is bit t % 32 of word t // 32, set if allowed.

        The same array until `advance`. Bits at or beyond V are clear.
        """
        if self._mask is None:
            mask = self._compute_mask() if self.failure is None else None
            self._mask = self._grammar.eos_mask if mask is None else mask
        return self._mask

    def advance(self, token_id: int) -> None:
        """Take the next token, and find out at once whether another can follow: a model need not have an EOS.

        Raises:
            RuntimeError: the mask forbids it, so the caller has not applied the mask.
        """
        mask = self.mask()
        if not (0 <= token_id < mask.size * 32 and int(mask[token_id // 32]) >> (token_id % 32) & 1):
            raise RuntimeError(f"token {token_id} is forbidden by the grammar of its request")
        if self.is_finished:
            return
        self._attempt(lambda matcher: matcher.consume_token(token_id))
        self._token_ids.append(token_id)
        self._mask = None
        if not self.is_finished:
            self.mask()

    def _compute_mask(self) -> NDArray[np.int32] | None:
        """None, and `failure`, if nothing may come next."""
        bits = self._attempt(LLMatcher.compute_bitmask)
        if self.failure is not None:
            return None
        mask = self._grammar.own_mask(bits)
        if mask.any():
            return mask
        self.failure = "the model has no token that goes on"
        return None

    def _attempt(self, action: Callable[[LLMatcher], Any]) -> Any:
        """Do something with the matcher, once more with a fresh one if it hits a limit.

        Matchers of one grammar share their lexer, and with it the limit on its states: other requests may have used it
        up.
        """
        result = action(self._matcher)
        if self._matcher.is_error():
            self._matcher = self._grammar.renewed_matcher()
            self._matcher.consume_tokens(self._token_ids)
            result = action(self._matcher)
        if self._matcher.is_error():
            self.failure = explained(self._matcher.get_error())
        return result


class Grammar:
    """Owns a compiled grammar, from which any number of requests start."""

    def __init__(
        self, build: Callable[[], LLMatcher], valid_mask: NDArray[np.int32], eos_mask: NDArray[np.int32]
    ) -> None:
        self._build = build
        self._valid_mask = valid_mask
        self._pristine = build()
        self.eos_mask = eos_mask
        self.error = self._probe()
        """What is wrong with the grammar, or empty."""

    def start(self) -> GrammarState:
        """The state of a new request, independent of all others."""
        return GrammarState(self)

    def new_matcher(self) -> LLMatcher:
        """A matcher at the beginning, in microseconds. It shares what the lexer has learnt with its siblings."""
        return self._pristine.deep_copy()

    def renewed_matcher(self) -> LLMatcher:
        """A matcher at the beginning that has learnt nothing yet; those to come share with it."""
        self._pristine = self._build()
        return self.new_matcher()

    def own_mask(self, bits: bytes) -> NDArray[np.int32]:
        """A mask of exactly the model's vocabulary, from one of llguidance's."""
        mask: NDArray[np.int32] = np.frombuffer(bits, np.int32)[: self._valid_mask.size] & self._valid_mask
        return mask

    def _probe(self) -> str:
        """Some faults show only in the first mask."""
        matcher = self.new_matcher()
        if not matcher.is_error() and not self.own_mask(matcher.compute_bitmask()).any():
            return "no text matches it"
        return str(matcher.get_error())


class GrammarCompiler:
    """Owns the compiled grammars that were used last. May be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare the vocabulary, which takes tenths of a second.

        Args:
            tokenizer: whose tokens the masks speak of.
            vocab_size: V, the number of logits of the model, which may differ from the tokenizer's.

        Raises:
            ValueError: it is not a tokenizer of the tokenizers library.
        """
        eos_ids = sorted(id for id in tokenizer.eos_ids if id < vocab_size)
        self._tokenizer = LLTokenizer(
            tokenizer.to_json(), n_vocab=max(vocab_size, tokenizer.num_ids), eos_token=eos_ids or None
        )
        self._masks = (_packed(range(vocab_size), vocab_size), _packed(eos_ids, vocab_size))
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._cache: OrderedDict[tuple[str, GrammarType], Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._free_places = threading.Semaphore(MAX_COMPILING)

    def compile(self, grammar: str, grammar_type: GrammarType) -> Grammar:
        """The compiled grammar, from the cache if it was used lately.

        Takes at most about MAX_COMPILE_SECONDS; other threads run meanwhile.

        Raises:
            EngineError: INVALID, when it is not a grammar, or needs what llguidance cannot do, or is too heavy.
        """
        key = (grammar, grammar_type)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        compiled = self._build(to_lark(grammar, grammar_type))
        if compiled.error:
            raise refused(explained(compiled.error))
        with self._lock:
            self._cache[key] = compiled
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled

    def _build(self, lark: str) -> Grammar:
        """Build on a thread of its own, as llguidance cannot be interrupted; a late one is left to end alone."""
        built: list[Grammar] = []

        def matcher() -> LLMatcher:
            return LLMatcher(self._tokenizer, lark, limits=self._limits, log_level=0)

        def build() -> None:
            try:
                built.append(Grammar(matcher, *self._masks))
            finally:
                self._free_places.release()

        deadline = time.monotonic() + MAX_COMPILE_SECONDS
        if not self._free_places.acquire(timeout=MAX_COMPILE_SECONDS):
            raise refused("other grammars take too long to compile, try again later")
        thread = threading.Thread(target=build, name="grammar", daemon=True)
        thread.start()
        thread.join(max(deadline - time.monotonic(), 0))
        if not built:
            raise refused(f"it does not compile within {MAX_COMPILE_SECONDS:g} seconds")
        return built[0]


def _packed(ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """int32[ceil(V / 32)] with the bits of these ids set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
