"""What transformers itself says about a prompt: greedy ids and their log-probabilities."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.tiny_model import byte_level_tokenizer

NUM_REFERENCE_TOKENS = 24


@dataclass(frozen=True)
class Reference:
    """The first NUM_REFERENCE_TOKENS ids after a prompt, and where among them the model would end."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def encode(text: str) -> list[int]:
    """The ids that a prompt has."""
    ids: list[int] = byte_level_tokenizer().encode(text)
    return ids


def prompt_of_len(num_tokens: int) -> str:
    """A text of exactly so many tokens, BOS included."""
    return "".join(chr(ord("!") + (number * number + num_tokens) % 30) for number in range(num_tokens - 1))


@cache
def greedy_reference(folder: Path, text: str, num_tokens: int = NUM_REFERENCE_TOKENS) -> Reference:
    """Generate with `model.generate`, for this prompt alone, going on after end tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([encode(text)])
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False
        )
        logprobs = torch.log_softmax(model(output).logits[0].float(), dim=-1)
    ids = output[0, prompt.shape[1] :].tolist()
    positions = range(prompt.shape[1] - 1, output.shape[1] - 1)
    chosen = [logprobs[position, id].item() for position, id in zip(positions, ids, strict=True)]
    return Reference(tuple(prompt[0].tolist()), tuple(ids), tuple(chosen))
