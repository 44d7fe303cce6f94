"""What tests of the engine share."""

import pytest

from tests.engine.grammars import VOCAB_SIZE, make_tokenizer
from tests.engine.scripted_driver import ScriptedDriver
from tpu_tgi_server.engine.grammar import GrammarCompiler
from tpu_tgi_server.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE)


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver()
