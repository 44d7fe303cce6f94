"""How often a model with int8 weights takes the same best token as in bfloat16, over text that it has written itself.

    python scripts/int8_agreement.py MODEL_FOLDER

prints one JSON line. Both see the same tokens at every position (teacher forcing), and run on the CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tpu_tgi_server.model.int8 import Int8Linear, quantize, replace_linears
from tpu_tgi_server.runtime.cpu_linear import speed_up_linear

TOPICS = ("the sea", "a small town", "how bread is made", "the moon", "a lost dog", "trains", "music", "an old tree")
NUM_TEXTS_A_TOPIC = 4
NUM_NEW_TOKENS = 64
TEXTS_AT_A_TIME = 8


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def write_texts(folder: Path) -> torch.Tensor:
    """int64 [N, prompt + NUM_NEW_TOKENS], sampled, so that no text repeats itself; in float32, for speed."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = [f"This is a story about {topic}." for topic in TOPICS for _ in range(NUM_TEXTS_A_TOPIC)]
    texts: torch.Tensor = load(folder, torch.float32).generate(
        **tokenizer(prompts, return_tensors="pt", padding=True),
        max_new_tokens=NUM_NEW_TOKENS,
        min_new_tokens=NUM_NEW_TOKENS,
        do_sample=True,
        temperature=0.8,
    )
    return texts


@torch.inference_mode()
def best_tokens(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """int64 [N, NUM_NEW_TOKENS] for N texts, the best next token at each position of the written part."""
    best = [
        model(part).logits[:, -NUM_NEW_TOKENS - 1 : -1].argmax(dim=-1) for part in torch.split(texts, TEXTS_AT_A_TIME)
    ]
    return torch.cat(best)


def round_weights(model: Any) -> None:
    """Turn a loaded model into one of int8 weights, as loading does it tensor by tensor."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    replace_linears(model)
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            module.weight.data, module.scale.data = quantize(weights[f"{name}.weight"])


def agreement(folder: Path) -> float:
    """The share of positions at which both take the same token."""
    texts = write_texts(folder)
    exact = load(folder, torch.bfloat16)
    speed_up_linear(exact)
    best = best_tokens(exact, texts)
    rounded = load(folder, torch.bfloat16)
    round_weights(rounded)
    return (best_tokens(rounded, texts) == best).float().mean().item()


def main(folder: str) -> None:
    share = agreement(Path(folder))
    num_tokens = len(TOPICS) * NUM_TEXTS_A_TOPIC * NUM_NEW_TOKENS
    print(json.dumps({"int8_top1_agreement": round(share, 4), "num_tokens": num_tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
