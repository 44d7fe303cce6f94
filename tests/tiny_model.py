"""Random models of two layers and a byte-level tokenizer, saved as ordinary model folders."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<|bos|>"
EOS = "<|eos|>"
VOCAB_SIZE = 300
MAX_POSITIONS = 512
NUM_LAYERS = 2
WINDOW = 8
"""Of the second layer of the model that has windows."""

CORPUS = ["the quick brown fox jumps over the lazy dog and then they read another story in the other garden"]


def byte_level_tokenizer() -> Any:
    """Every byte is a token, a few words are one, and BOS stands before every text."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)


def save_tiny_model(folder: Path) -> None:
    """Write a Llama to `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _save(folder, LlamaConfig, LlamaForCausalLM)


def save_windowed_model(folder: Path) -> None:
    """Write a Qwen2 to `folder`, whose second layer has a sliding window."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    _save(folder, Qwen2Config, Qwen2ForCausalLM, **windows)


def _save(folder: Path, config_class: Any, model_class: Any, **fields: Any) -> None:
    """The weights are large, so that the best token never wins by a rounding error."""
    import torch

    tokenizer = byte_level_tokenizer()
    config = config_class(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        **fields,
    )
    torch.manual_seed(0)
    model_class(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
