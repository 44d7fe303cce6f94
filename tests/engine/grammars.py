"""A tokenizer to constrain, and walks of random tokens under a grammar."""

import random

import numpy as np
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tpu_tgi_server.engine.grammar import GrammarState
from tpu_tgi_server.engine.tokenizer import Tokenizer

NUM_TRAINED = 400

VOCAB_SIZE = NUM_TRAINED + 37
"""Of the model: more than the tokenizer has, and no multiple of 32."""


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
