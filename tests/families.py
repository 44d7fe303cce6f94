"""Tiny random models of every family that is served, and what transformers itself says about them.

    python -m tests.families DEVICE PARALLEL FOLDER...

prints one JSON object with the answers of each model in the folders, see `Answers`.
"""

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.driver import Answer, Driver, GeneratorStub, Stub, new_request
from tests.reference import encode, prompt_of_len
from tests.tiny_model import VOCAB_SIZE, byte_level_tokenizer
from tpu_tgi_server.config import Device, Parallel, Settings
from tpu_tgi_server.runtime.interface import Runtime

WINDOW = 8
CHUNK_TOKENS = 16
RING_LEN = 32
"""Cells of a layer with the window: it and a chunk, in whole units."""
PROMPT_LENS = (3, 13, 29)
"""All but the first are longer than the window, and the last than a chunk."""
NUM_NEW_TOKENS = 40
"""More than a ring has cells."""
MAX_TOTAL_TOKENS = 80
PROMPTS = tuple(map(prompt_of_len, PROMPT_LENS))

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 1,  # which divides among neither 2 nor 4 cores
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    # two heads a row of the cache on one core and on each of two, and one on each of four
    "llama with heads of 64": ("llama", {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma-2": ("gemma2", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "gemma-3": ("gemma3_text", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 18},
    ),
    "phi-3": ("phi3", {"sliding_window": WINDOW}),
    "phi-3 long": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": MAX_TOTAL_TOKENS},
    ),
    "gpt-2": ("gpt2", {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm 2": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "nemotron": ("nemotron", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
}
"""By name: the model type of transformers, and what differs from SHAPE."""

WINDOWS: dict[str, list[int | None]] = {
    "mistral": [WINDOW, WINDOW],
    "mixtral": [WINDOW, WINDOW],
    "gemma-2": [WINDOW, None],
    "gemma-3": [WINDOW, None],
    "qwen2 with windows": [None, WINDOW],
    "phi-3": [WINDOW, WINDOW],
}
"""Of the two layers of each family that has any."""


def save_family(name: str, folder: Path) -> None:
    """Write a model of a family to a folder, as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **{**SHAPE, **fields})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases: not all the same, or a wrong one would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)


Outputs = list[tuple[list[int], list[float]]]
"""Ids and log-probabilities for each prompt."""


@dataclass(frozen=True)
class Answers:
    """What one model answers on one device.

    Attributes:
        alone, batched, joined: each prompt by itself, all in one prefill, and one more joining at every step.
        logits: for each prompt all logits [T, V] after its tokens, prefilled together with the other prompts; empty
            where they are out of reach.
        ring_lens: how many cells of a slot each layer has; empty where that is out of reach.
    """

    alone: Outputs
    batched: Outputs
    joined: Outputs
    logits: list[list[list[float]]]
    ring_lens: list[int]


def settings_of(folder: str, device: Device, **given: Any) -> Settings:
    """Small slots of which there are more than prompts."""
    return Settings(
        folder,
        device=device,
        max_batch_size=4,
        max_total_tokens=MAX_TOTAL_TOKENS,
        max_input_tokens=36,
        prefill_chunk_tokens=CHUNK_TOKENS,
        **given,
    )


def collect(runtime: Runtime, folder: str) -> Answers:
    """The answers of a model that this process loads."""
    from tpu_tgi_server.engine.loading import load_generator

    settings = settings_of(folder, Device.XLA_CPU if runtime.is_compiled else Device.CPU)
    generator, _ = load_generator(settings, runtime, lambda *_: None)
    cache = device_steps(generator)._cache
    ring_lens = [cache.ring_len(layer) for layer in range(len(cache.keys))]
    return Answers(*outputs(GeneratorStub(generator)), _logits(runtime, generator), ring_lens)


def outputs(stub: Stub) -> tuple[Outputs, Outputs, Outputs]:
    """Alone, batched and joined."""
    requests = [new_request(number, prompt, new=NUM_NEW_TOKENS) for number, prompt in enumerate(PROMPTS)]
    alone = [Driver(stub).run(request.id, request)[0] for request in requests]
    batched = Driver(stub).run(10, *requests)
    return _plain(alone), _plain(batched), _plain(_joined(stub))


def device_steps(generator: Any) -> Any:
    """What runs on the device under a generator."""
    return generator._model._steps


def _plain(answers: list[Answer]) -> Outputs:
    return [(list(answer.ids), list(answer.logprobs)) for answer in answers]


def _joined(stub: Stub) -> list[Answer]:
    driver = Driver(stub)
    running = None
    for number, prompt in enumerate(PROMPTS):
        joining = driver.prefill(number, new_request(number, prompt, new=NUM_NEW_TOKENS))
        running = driver.decode(*[batch for batch in (running, joining) if batch])
    driver.drain(running)
    return [driver.answers[number] for number in range(len(PROMPTS))]


def _logits(runtime: Runtime, generator: Any) -> list[list[list[float]]]:
    """Through the device's part of a prefill, before a token is chosen."""
    import torch

    from tpu_tgi_server.model.interface import PromptChunk
    from tpu_tgi_server.model.packing import pack_chunks, unpack_chunks

    steps = device_steps(generator)
    chunks = [PromptChunk(slot, encode(prompt)) for slot, prompt in enumerate(PROMPTS)]
    packed = torch.from_numpy(pack_chunks(chunks, MAX_TOTAL_TOKENS, steps.num_slots))

    def all_logits(tensor: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = steps._prompt_logits(unpack_chunks(tensor, steps.num_slots), None, 0)[0]
        return logits

    step = runtime.prepare(all_logits, steps.cache_tensors)
    logits = runtime.to_host(step(runtime.to_device(packed)))
    ends = np.cumsum(PROMPT_LENS)
    return [logits[end - length : end].tolist() for length, end in zip(PROMPT_LENS, ends, strict=True)]


@cache
def expected(folder: Path) -> tuple[list[tuple[list[int], list[float]]], list[Any]]:
    """From `generate` and `forward` of transformers, for each prompt alone: what `Answers` holds."""
    import torch
    from transformers import AutoModelForCausalLM

    # sdpa would leave out the soft caps of Gemma 2; grouped products of experts want sizes of whole 16 bytes
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    model.generation_config.eos_token_id = None
    answers, logits = [], []
    for text in PROMPTS:
        prompt = torch.tensor([encode(text)])
        with torch.inference_mode():
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
            )
            all_logits = model(output).logits[0]
        ids = output[0, prompt.shape[1] :]
        logprobs = torch.log_softmax(all_logits[prompt.shape[1] - 1 : -1], dim=-1)
        answers.append((ids.tolist(), logprobs.gather(1, ids[:, None])[:, 0].tolist()))
        logits.append(all_logits[: prompt.shape[1]])
    return answers, logits


def _print_answers(_rank: int, runtime: Runtime, folders: list[str]) -> None:
    print(json.dumps({Path(folder).name: asdict(collect(runtime, folder)) for folder in folders}))


if __name__ == "__main__":
    from tpu_tgi_server.runtime.select import select_runtime

    chosen = select_runtime(Device(sys.argv[1]), parallel=Parallel(sys.argv[2]))
    chosen.launch(_print_answers, (chosen, sys.argv[3:]))
