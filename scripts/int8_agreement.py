"""How often a model with int8 weights takes the same best token as in bfloat16, over text that the latter has written.

    python scripts/int8_agreement.py MODEL_FOLDER

prints one JSON line. Both see the same tokens at every position (teacher forcing).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tpu_tgi_server.model.int8 import Int8Linear, quantize, replace_linears

NUM_TEXTS = 8
NUM_NEW_TOKENS = 256
TOPICS = ("the sea", "a small town", "how bread is made", "the moon", "a lost dog", "trains", "music", "an old tree")


def write_texts(model: Any, tokenizer: Any) -> torch.Tensor:
    """[NUM_TEXTS, NUM_NEW_TOKENS + prompt], sampled, so that the texts do not repeat themselves."""
    torch.manual_seed(0)
    prompts = tokenizer([f"This is a story about {topic}." for topic in TOPICS], return_tensors="pt", padding=True)
    output: torch.Tensor = model.generate(
        **prompts, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=True, temperature=0.8
    )
    return output


@torch.inference_mode()
def best_tokens(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """int64 [NUM_TEXTS, NUM_NEW_TOKENS], the best next token at each position of the written part."""
    best = [model(text[None]).logits[0, -NUM_NEW_TOKENS - 1 : -1].argmax(dim=-1) for text in texts]
    return torch.stack(best)


def round_weights(model: Any) -> None:
    """Turn a loaded model into one of int8 weights, as loading does it tensor by tensor."""
    weights = {name: parameter.data for name, parameter in model.named_parameters()}
    replace_linears(model)
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            module.weight.data, module.scale.data = quantize(weights[f"{name}.weight"])


def agreement(folder: Path) -> float:
    """The share of positions at which both take the same token."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    texts = write_texts(model, tokenizer)
    exact = best_tokens(model, texts)
    round_weights(model)
    return (best_tokens(model, texts) == exact).float().mean().item()


def main(folder: str) -> None:
    share = agreement(Path(folder))
    print(json.dumps({"int8_top1_agreement": round(share, 4), "num_tokens": NUM_TEXTS * NUM_NEW_TOKENS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
