"""How often a model with int8 weights takes the same best token as in bfloat16, over answers that it has written.

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

TASKS = ("Tell a story about", "Explain in simple words", "Write a poem about", "List some facts about")
TOPICS = ("the sea", "small towns", "bread", "the moon", "lost dogs", "trains", "music", "old trees")
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the authors of SmolLM2 recommend."""
NUM_NEW_TOKENS = 64
TEXTS_AT_A_TIME = 8


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def write_answers(folder: Path) -> dict[str, torch.Tensor]:
    """A model's input [N, prompt + NUM_NEW_TOKENS]: questions, and answers that are written in float32, for speed."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    questions = [[{"role": "user", "content": f"{task} {topic}."}] for task in TASKS for topic in TOPICS]
    prompts = tokenizer.apply_chat_template(
        questions, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    model = load(folder, torch.float32)
    speed_up_linear(model)
    answers: torch.Tensor = model.generate(
        **prompts, **SAMPLING, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS
    )
    written = torch.ones_like(answers[:, -NUM_NEW_TOKENS:])
    return {"input_ids": answers, "attention_mask": torch.cat([prompts["attention_mask"], written], dim=1)}


@torch.inference_mode()
def best_tokens(model: Any, texts: dict[str, torch.Tensor]) -> torch.Tensor:
    """int64 [N, NUM_NEW_TOKENS] for N texts, the best next token at each position of the answers."""
    best = []
    for begin in range(0, len(texts["input_ids"]), TEXTS_AT_A_TIME):
        part = {name: tensor[begin : begin + TEXTS_AT_A_TIME] for name, tensor in texts.items()}
        best.append(model(**part, logits_to_keep=NUM_NEW_TOKENS + 1).logits[:, :-1].argmax(dim=-1))
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
    texts = write_answers(folder)
    exact = load(folder, torch.bfloat16)
    speed_up_linear(exact)
    best = best_tokens(exact, texts)
    rounded = load(folder, torch.bfloat16)
    round_weights(rounded)
    speed_up_linear(rounded)
    return (best_tokens(rounded, texts) == best).float().mean().item()


def main(folder: str) -> None:
    share = agreement(Path(folder))
    num_tokens = len(TASKS) * len(TOPICS) * NUM_NEW_TOKENS
    print(json.dumps({"int8_top1_agreement": round(share, 4), "num_tokens": num_tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
