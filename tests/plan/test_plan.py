"""From a config.json to what the TPU's compiler says, for one small model."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_hub import MODEL, FakeHub, fake_hub
from tests.servers import ROOT
from tests.tiny_model import NUM_LAYERS
from tpu_tgi_server.model.files import WEIGHTS
from tpu_tgi_server.plan.chips import CHIPS
from tpu_tgi_server.plan.messages import Compiled, Traced, TraceRequest
from tpu_tgi_server.plan.processes import PlanError, compile_graphs, trace_graphs

needs_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu") or not importlib.util.find_spec("jax"),
    reason="compiling for a TPU needs libtpu and jax, the extra `plan`",
)
DECODE = "decode 256 greedy"
CHUNK = "chunk 256 greedy"


ROW_SIZE = 128
"""On one core the two heads of 16 share a row of whole lanes with six that are missing; over two, each fills its own
with zeros.
"""


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The tiny model's config and nothing else."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text((tiny_model_folder / "config.json").read_text())
    return folder


def request_for(folder: Path, target: Path, **changes: object) -> TraceRequest:
    sizes = {"num_slots": 4, "max_input_tokens": 32, "max_total_tokens": 256}
    return TraceRequest(folder=str(folder), target=str(target), **(sizes | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def decode_traced(config_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A decode step on one core."""
    return trace_graphs(request_for(config_folder, tmp_path_factory.mktemp("decode"), graphs=(DECODE,)))


def plan(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from tpu_tgi_server.cli import tools_app; tools_app()", "plan", *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables)


def test_every_graph_of_the_server_is_traced_once(config_folder: Path, tmp_path: Path) -> None:
    traced = trace_graphs(request_for(config_folder, tmp_path))
    assert list(traced.modules) == [
        f"{shape} {choice}" for choice in ("greedy", "sampled") for shape in ("prefill 16", "prefill 32", "decode 256")
    ]
    assert len({Path(module.path).read_bytes() for module in traced.modules.values()}) == traced.num_graphs == 6
    assert traced.cache_bytes == 2 * NUM_LAYERS * 4 * 256 * ROW_SIZE * 2


def test_cache_of_a_layer_with_a_window_counts_as_short_as_it_is(tmp_path: Path, windowed_model_folder: Path) -> None:
    """256 cells in the first layer, 48 in the second: the window of 8 and a row of 32, in units of 16.

    So many slots are more than this host holds, which a plan need not mind.
    """
    num_slots = 2**20
    traced = trace_graphs(request_for(windowed_model_folder, tmp_path, graphs=(DECODE,), num_slots=num_slots))
    assert traced.cache_bytes == 2 * num_slots * (256 + 48) * ROW_SIZE * 2
    assert traced.cache_sizes == [num_slots * 48 * ROW_SIZE, num_slots * 256 * ROW_SIZE]


def test_over_two_cores_each_has_its_part_of_weights_and_cache(
    config_folder: Path, tmp_path: Path, decode_traced: Traced
) -> None:
    alone = decode_traced
    traced = trace_graphs(request_for(config_folder, tmp_path, graphs=(DECODE,), num_cores=2))
    assert traced.cache_bytes == 2 * NUM_LAYERS * 4 * 256 * ROW_SIZE * 2, "of two heads of 16, each core has one"
    norms = 2 * (2 * NUM_LAYERS + 1) * 64
    rotary = 2 * 4 * 8
    assert traced.weights_bytes == (alone.weights_bytes - norms - rotary) // 2 + norms + rotary
    module = traced.modules[DECODE]
    assert module.result_axes == [None, None, *[1] * 2 * NUM_LAYERS]
    assert [module.parameter_axes[donor] for donor in module.donors] == [1] * 2 * NUM_LAYERS


def test_int8_weights_take_a_byte_each(config_folder: Path, tmp_path: Path, decode_traced: Traced) -> None:
    wide, narrow = decode_traced, trace_graphs(request_for(config_folder, tmp_path, graphs=(DECODE,), quantize="int8"))
    outputs = (64 + 32 + 32 + 64, 128 + 128 + 64)
    saved = NUM_LAYERS * (64 * outputs[0] + 64 * (128 + 128) + 128 * 64)
    factors = NUM_LAYERS * 4 * sum(outputs)
    assert wide.weights_bytes - narrow.weights_bytes == wide.streamed_bytes - narrow.streamed_bytes == saved - factors


@needs_compiler
def test_a_decode_step_compiles_for_a_tpu_and_updates_the_cache_in_place(decode_traced: Traced) -> None:
    traced = decode_traced
    results = compile_graphs(traced, CHIPS["v5e"], lambda *_: None)
    compiled = results[DECODE]
    assert isinstance(compiled, Compiled), compiled
    assert compiled.num_donors == compiled.num_aliased == 2 * NUM_LAYERS
    assert compiled.memory_bytes >= traced.weights_bytes + traced.cache_bytes
    assert compiled.num_collectives == {}


@needs_compiler
def test_over_several_cores_the_cache_is_updated_in_place_and_sums_are_exchanged(
    config_folder: Path, tmp_path: Path
) -> None:
    sizes = {"num_cores": 4, "prefill_chunk_tokens": 16}
    traced = trace_graphs(request_for(config_folder, tmp_path, graphs=(DECODE, CHUNK), **sizes))
    results = compile_graphs(traced, CHIPS["v5e"], lambda *_: None)
    for compiled in results.values():
        assert isinstance(compiled, Compiled), compiled
        assert compiled.num_aliased == 2 * NUM_LAYERS
        assert compiled.num_collectives["all-reduce"] >= 2 * NUM_LAYERS


@needs_compiler
def test_a_model_on_the_hub_is_planned_from_its_config_alone(config_folder: Path, tmp_path: Path) -> None:
    files = {"config.json": (config_folder / "config.json").read_bytes(), WEIGHTS: b"weights"}
    options = ["--max-total-tokens", "32", "--max-input-tokens", "16", "--tpu", "v5e-4", "--parallel", "tensor"]
    with fake_hub(FakeHub(files)) as hub:
        place = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        done = plan("--model-id", MODEL, *options, **place)
        assert hub.fetched == ["config.json"]
    assert done.returncode == 0, done.stderr
    assert "fits v5e-4: each chip has its part of the model and of all 8 slots" in done.stdout
    assert "compiled prefill 16 sampled (4/4)" in done.stderr


def test_offline_a_model_that_is_nowhere_is_one_sentence(tmp_path: Path) -> None:
    done = plan("--model-id", MODEL, "--tpu", "v5e-1", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    complaint = f"error: {MODEL} is neither a folder nor in the cache, and HF_HUB_OFFLINE forbids to fetch it\n"
    assert done.stderr == complaint


def test_a_config_of_an_unknown_architecture_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-knows"}))
    with pytest.raises(PlanError, match="nobody-knows"):
        trace_graphs(request_for(tmp_path, tmp_path))


def test_a_model_that_the_server_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(PlanError, match="is a mamba model and keeps a recurrent state"):
        trace_graphs(request_for(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model-id", "missing", "--tpu", "v9-1"], "v9-1"),
        (["--model-id", "missing", "--tpu", "v5e-4", "--parallel", "auto"], "--parallel auto cannot be planned"),
        (["--model-id", "missing", "--tpu", "v5e-4", "--quantize", "int4"], "only int8 is"),
    ],
)
def test_what_cannot_be_planned_is_a_usage_error(arguments: list[str], complaint: str) -> None:
    done = plan(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
