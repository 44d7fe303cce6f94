"""Constrained decoding: which tokens may come next under a regex or a JSON schema.

Owns compiled grammars and the position of each request in its grammar. Knows nothing of sampling or devices: a mask is
a row of packed bits. What a request says under a grammar is a text that matches, or the beginning of one.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from tpu_tgi_server.engine.grammar_text import explained, refused, to_lark
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import EngineError, GrammarSource, GrammarType

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
    """Owns the compiled grammars that were used last. May be called from any thread.

    Everything heavy happens on threads of its own: `begin` returns at once, and `compile` waits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare nothing yet.

        Args:
            tokenizer: whose tokens the masks speak of.
            vocab_size: V, the number of logits of the model, which may differ from the tokenizer's.
        """
        self._vocabulary = _Vocabulary(tokenizer, vocab_size)
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._cache: OrderedDict[GrammarSource, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._waiters = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="grammar")
        self._free_places = threading.Semaphore(MAX_COMPILING)

    def begin(self, sources: Sequence[GrammarSource]) -> "list[Future[Grammar]]":
        """Start to compile those that were not used lately. Of the others the futures are those of then."""
        with self._lock:
            for source in sources:
                if source not in self._cache:
                    self._cache[source] = self._waiters.submit(self._compile, *source)
                self._cache.move_to_end(source)
            while len(self._cache) > max(MAX_CACHED_GRAMMARS, len(set(sources))):
                self._cache.popitem(last=False)
            return [self._cache[source] for source in sources]

    def compile(self, grammar: str, grammar_type: GrammarType) -> Grammar:
        """The compiled grammar. Takes at most about MAX_COMPILE_SECONDS, and no time after `begin` has ended.

        Raises:
            EngineError: INVALID, when it is not a grammar, or needs what llguidance cannot do, or is too heavy.
            ValueError: the tokenizer is not one of the tokenizers library.
        """
        source = (grammar, grammar_type)
        (compiling,) = self.begin([source])
        try:
            return compiling.result()
        except (EngineError, ValueError):
            with self._lock:  # another try may fare better: the machine may have been busy
                if self._cache.get(source) is compiling:
                    del self._cache[source]
            raise

    def _compile(self, grammar: str, grammar_type: GrammarType) -> Grammar:
        compiled = self._build(to_lark(grammar, grammar_type))
        if compiled.error:
            raise refused(explained(compiled.error))
        return compiled

    def _build(self, lark: str) -> Grammar:
        """Build on one more thread, as llguidance cannot be interrupted; a late one is left to end alone."""
        built: list[Grammar] = []
        vocabulary = self._vocabulary
        tokenizer = vocabulary.tokenizer()

        def matcher() -> LLMatcher:
            return LLMatcher(tokenizer, lark, limits=self._limits, log_level=0)

        def build() -> None:
            try:
                built.append(Grammar(matcher, vocabulary.valid_mask, vocabulary.eos_mask))
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


class _Vocabulary:
    """Owns what all grammars need to know of the tokens. Prepared with the first of them, in tenths of a second."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(id for id in tokenizer.eos_ids if id < vocab_size)
        self._lock = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self.valid_mask = _packed(range(vocab_size), vocab_size)
        self.eos_mask = _packed(self._eos_ids, vocab_size)

    def tokenizer(self) -> LLTokenizer:
        """llguidance's view of the tokenizer.

        Raises:
            ValueError: it is not one of the tokenizers library.
        """
        with self._lock:
            if self._prepared is None:
                num_ids = max(self._vocab_size, self._source.num_ids)
                self._prepared = LLTokenizer(self._source.to_json(), n_vocab=num_ids, eos_token=self._eos_ids or None)
            return self._prepared


def _packed(ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """int32[ceil(V / 32)] with the bits of these ids set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
