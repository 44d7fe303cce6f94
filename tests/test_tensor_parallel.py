"""One model over several cores answers as it does on one, whether or not its heads divide among them.

The tiny model has 4 heads, 2 key/value heads and 300 tokens. The cores are virtual ones of the CPU.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Driver, GeneratorStub, batch_of, new_request
from tests.model.test_graphs import collect_in_process
from tests.reference import Reference, greedy_reference, prompt_of_len
from tests.servers import ROOT, ServerProcess, ready_server, start_model_server
from tests.test_against_transformers import assert_equal
from tests.tiny_model import NUM_LAYERS
from tests.xla_facts import MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS, StepFacts
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.plan.messages import TraceRequest
from tpu_tgi_server.plan.processes import trace_graphs
from tpu_tgi_server.runtime.cpu import CpuRuntime

PROMPT_LENS = (1, 7, 33, 60)
PROMPTS = tuple(map(prompt_of_len, PROMPT_LENS))
NUM_TOKENS = 16
SIZES: dict[str, Any] = {
    "max_total_tokens": 128,
    "max_input_tokens": 64,
    "max_batch_size": 4,
    "prefill_chunk_tokens": 32,
}
SAMPLED: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 1},
    {"temperature": 1.5, "top_k": 40, "seed": 2},
    {"top_p": 0.8, "typical_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 3},
    {"watermark": True, "do_sample": True, "seed": 4},
]


@pytest.fixture(scope="module", params=[2, 3, 4])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp(f"cores-{request.param}")
    sizes = [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    options = ["--device", "xla-cpu", "--parallel", "tensor", *sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_NUM_DEVICES", str(request.param))
        with ready_server(start_model_server(folder, tiny_model_folder, *options)) as server:
            yield server


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    with server.connect() as stub:
        yield stub


@pytest.fixture
def references(tiny_model_folder: Path) -> list[Reference]:
    return [greedy_reference(tiny_model_folder, prompt) for prompt in PROMPTS]


def test_prompts_sent_alone_and_together(stub: Any, references: list[Reference]) -> None:
    driver = Driver(stub)
    requests = [new_request(number, prompt, new=NUM_TOKENS) for number, prompt in enumerate(PROMPTS)]
    for answer, reference in zip(driver.run(0, *requests), references, strict=True):
        assert_equal(answer, reference, NUM_TOKENS)
    for number, (prompt, reference) in enumerate(zip(PROMPTS, references, strict=True), start=10):
        (answer,) = driver.run(number, new_request(number, prompt, new=NUM_TOKENS))
        assert_equal(answer, reference, NUM_TOKENS)


def test_join_does_not_change_running_requests(stub: Any, references: list[Reference]) -> None:
    driver = Driver(stub)
    running = None
    for number, prompt in enumerate(PROMPTS):
        joining = driver.prefill(number, new_request(number, prompt, new=NUM_TOKENS))
        running = driver.decode(*[batch for batch in (running, joining) if batch])
    driver.drain(batch_of(running))
    for number, reference in enumerate(references):
        assert_equal(driver.answers[number], reference, NUM_TOKENS)


def test_sampled_tokens_are_those_of_one_core(stub: Any, tiny_model_folder: Path) -> None:
    settings = Settings(str(tiny_model_folder), device=Device.CPU, **SIZES)
    generator, _ = load_generator(settings, CpuRuntime(), lambda *_: None)
    requests = [
        new_request(number, prompt, new=NUM_TOKENS, parameters=parameters, top_n_tokens=5, prefill_logprobs=True)
        for number, (prompt, parameters) in enumerate(zip(PROMPTS, SAMPLED, strict=True))
    ]
    expected = Driver(GeneratorStub(generator)).run(0, *requests)
    for answer, one_core in zip(Driver(stub).run(0, *requests), expected, strict=True):
        assert answer.ids == one_core.ids
        assert answer.logprobs == pytest.approx(one_core.logprobs, abs=1e-4)
        assert [tokens.ids for tokens in answer.top_tokens] == [tokens.ids for tokens in one_core.top_tokens]
        assert answer.prefill_tokens is not None
        assert one_core.prefill_tokens is not None
        assert answer.prefill_tokens.logprobs[1:] == pytest.approx(one_core.prefill_tokens.logprobs[1:], abs=1e-4)


def test_log_says_what_each_core_holds(server: ServerProcess) -> None:
    log = server.log.read_text()
    assert "MB of weights on each of" in log
    assert "MB of KV cache on each of" in log


def test_steps_compile_once_write_in_place_and_are_one_execution(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPU_NUM_DEVICES", "3")
    facts = collect_in_process(tiny_model_folder, 4, 20, "tensor", tmp_path)
    assert facts.num_compiled_while_loading == 0
    assert facts.num_compiled_by_warm_up == facts.num_graphs
    assert facts.num_compiled_by_requests == facts.num_compiled_by_second_warm_up == 0
    assert facts.num_aliased_buffers == facts.num_graphs // 2 * (2 * NUM_LAYERS + 2 * NUM_LAYERS + 1)
    assert facts.greedy_step == facts.sampled_step == StepFacts(1, 1, 1, 0)
    assert facts.masked_step == StepFacts(1, 2, 1, 0)
    assert_plan_has_the_splits_of(tmp_path, tiny_model_folder)


def assert_plan_has_the_splits_of(dump: Path, folder: Path) -> None:
    """What `tpu-tgi plan` tells the TPU's compiler about parameters is what torch_xla has told XLA, in each graph."""
    request = TraceRequest(
        str(folder),
        str(dump),
        num_slots=4,
        num_cores=3,
        max_input_tokens=MAX_INPUT_TOKENS,
        max_total_tokens=MAX_TOTAL_TOKENS,
        dtype="float32",
    )
    traced = trace_graphs(request)
    planned = sorted(
        (sorted(map(str, module.parameter_axes)), len(module.donors)) for module in traced.modules.values()
    )
    modules = [path.read_text() for path in dump.glob("*before_optimizations.txt")]
    compiled = sorted((parameter_axes(text), num_donors(text)) for text in modules if num_donors(text))
    assert planned == compiled


def parameter_axes(module: str) -> list[str]:
    """Along which axis each parameter of the entry is split, or None, in the order of their names."""
    entry = module[module.index("\nENTRY ") :]
    shardings = re.findall(r" parameter\(\d+\), sharding=\{(?:replicated|devices=\[([\d,]*)\].*?)\}", entry)
    return sorted(str(counts.split(",").index("3") if counts else None) for counts in shardings)


def num_donors(module: str) -> int:
    found = re.search(r"buffer_donor=\{ (.*?\)) \}", module)
    return found[1].count("(") if found else 0


LOAD = """
import json, sys
import torch_xla.debug.metrics as metrics
from pathlib import Path
from torch_xla.distributed.spmd import XLAShardedTensor
from tpu_tgi_server.config import Device, Parallel, Settings
from tpu_tgi_server.model import loading
from tpu_tgi_server.model.cache import CacheSizes
from tpu_tgi_server.model.files import find_model_files
from tpu_tgi_server.runtime.select import select_runtime

def shapes(tensor):
    return sorted({tuple(shard.data.shape) for shard in XLAShardedTensor(tensor).local_shards})

def main(rank, runtime):
    settings = Settings(sys.argv[1])
    files = find_model_files(settings, lambda *_: None)
    loaded = loading.load_weights(files, runtime.default_dtype, runtime)
    num_bytes = metrics.metric_data("OutboundData")[1]
    cache = loading.allocate_cache(loaded.layers, CacheSizes(2, 16, 16), runtime.default_dtype, runtime)
    found = {name: shapes(weight) for name, weight in loaded.module.named_parameters()}
    print(json.dumps({"num_bytes": num_bytes, "cache": shapes(cache.keys[0]), **found}))

runtime = select_runtime(Device.XLA_CPU, parallel=Parallel.TENSOR)
runtime.launch(main, (runtime,))
"""


@dataclass
class Loaded:
    """What a process has put on its cores: the distinct shapes that they hold of each tensor, and all bytes sent."""

    shapes: dict[str, list[list[int]]]
    num_bytes: int


def load_on_cores(folder: Path, num_cores: int) -> Loaded:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CPU_NUM_DEVICES": str(num_cores)}
    command = [sys.executable, "-c", LOAD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return Loaded(num_bytes=found.pop("num_bytes"), shapes=found)


def test_each_core_holds_its_part_of_each_weight_and_no_more_is_sent(tiny_model_folder: Path) -> None:
    """Vocabulary and key/value heads over 3 cores: 300 tokens divide, 2 heads do not."""
    loaded = load_on_cores(tiny_model_folder, 3)
    layer = {name: loaded.shapes[f"model.layers.1.{name}.weight"] for name in ("self_attn.q_proj", "self_attn.k_proj")}
    assert layer == {"self_attn.q_proj": [[22, 64]], "self_attn.k_proj": [[11, 64]]}
    assert loaded.shapes["model.layers.1.self_attn.o_proj.weight"] == [[64, 22]]
    assert loaded.shapes["model.layers.1.mlp.up_proj.weight"] == [[43, 64]]
    assert loaded.shapes["model.layers.1.mlp.down_proj.weight"] == [[64, 43]]
    assert loaded.shapes["model.embed_tokens.weight"] == loaded.shapes["lm_head.weight"] == [[100, 64]]
    assert loaded.shapes["model.norm.weight"] == [[64]]
    assert loaded.shapes["cache"] == [[2, 1, 16, 128]]
    split = 2 * 100 * 64 + NUM_LAYERS * (2 * 22 * 64 + 2 * 11 * 64 + 3 * 43 * 64)
    whole = (2 * NUM_LAYERS + 1) * 64 + 2 * 8  # norms, and two buffers of the rotary embedding
    assert loaded.num_bytes == 3 * 4 * (split + whole)
