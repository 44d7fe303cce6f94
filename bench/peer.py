"""transformers itself, in a process of its own that does one piece of work for each line of its standard input.

    python -m bench.peer MODEL_FOLDER DTYPE

Lines in and out are JSON; see `Peer`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Peer:
    """Owns the benchmark's end of the pipes to the process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """`model.generate` on one batch of prompts of equal length: seconds, and the new ids of each."""
        return self._ask(work="generate", prompts=prompts, num_tokens=num_tokens)

    def serve(
        self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int], arrivals_s: Sequence[float], num_slots: int
    ) -> tuple[float, list[list[int]]]:
        """Continuous batching of prompts that arrive at these times: seconds until the last ends, and the new ids."""
        return self._ask(
            work="serve", prompts=prompts, num_tokens=num_tokens, arrivals_s=arrivals_s, num_slots=num_slots
        )

    def _ask(self, **work: Any) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(work), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process of transformers has ended, see its error above")
        seconds, ids = json.loads(answer)
        return seconds, ids


@contextmanager
def transformers_peer(model: Path, dtype: str) -> Iterator[Peer]:
    """A peer with the model loaded."""
    command = [sys.executable, "-m", "bench.peer", str(model), dtype]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready: what is measured while it still loads would share the machine
            yield Peer(process)
        finally:
            process.terminate()


def main(folder: str, dtype: str) -> None:
    import os

    os.environ["USE_TORCH_XLA"] = "0"
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        result = (run_generate if work.pop("work") == "generate" else run_serve)(model, **work)
        print(json.dumps(result), file=answers, flush=True)


def run_generate(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
    import torch

    inputs = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, do_sample=False
        )
    return time.perf_counter() - started, output[:, inputs.shape[1] :].tolist()


def run_serve(
    model: Any, prompts: list[list[int]], num_tokens: list[int], arrivals_s: list[float], num_slots: int
) -> tuple[float, list[list[int]]]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # a cache as large as the server's; on a machine without a GPU transformers does not find the sizes itself
    sizes = ContinuousBatchingConfig(max_batch_tokens=512, num_blocks=4 * num_slots, max_requests_per_batch=num_slots)
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max(num_tokens))
    ids: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(settings, continuous_batching_config=sizes) as manager:
        started = time.perf_counter()
        arriving = list(enumerate(zip(prompts, num_tokens, arrivals_s, strict=True)))
        while len(ids) < len(prompts):
            while arriving and time.perf_counter() - started >= arriving[0][1][2]:
                number, (prompt, wanted, _) = arriving.pop(0)
                manager.add_request(prompt, request_id=str(number), max_new_tokens=wanted, eos_token_id=-1)
            result = manager.get_result(timeout=0.01)
            if result is not None and result.is_finished():
                ids[result.request_id] = list(result.generated_tokens)
        seconds = time.perf_counter() - started
    return seconds, [ids[str(number)] for number in range(len(prompts))]


if __name__ == "__main__":
    main(*sys.argv[1:])
