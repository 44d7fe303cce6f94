"""From a config.json to what the TPU's compiler says, for one small model."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import ROOT
from tests.tiny_model import NUM_LAYERS
from tpu_tgi_server.plan.chips import CHIPS
from tpu_tgi_server.plan.messages import Compiled, TraceRequest
from tpu_tgi_server.plan.processes import PlanError, compile_graphs, trace_graphs

needs_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu") or not importlib.util.find_spec("jax"),
    reason="compiling for a TPU needs libtpu and jax, the extra `plan`",
)
DECODE = "decode 256 greedy"


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The tiny model's config and nothing else."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text((tiny_model_folder / "config.json").read_text())
    return folder


def request_for(folder: Path, target: Path, **changes: object) -> TraceRequest:
    sizes = {"num_slots": 4, "max_input_tokens": 32, "max_total_tokens": 256}
    return TraceRequest(folder=str(folder), target=str(target), **(sizes | changes))  # type: ignore[arg-type]


def plan(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from tpu_tgi_server.cli import tools_app; tools_app()", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_every_graph_of_the_server_is_traced_once(config_folder: Path, tmp_path: Path) -> None:
    traced = trace_graphs(request_for(config_folder, tmp_path))
    assert list(traced.modules) == [
        f"{shape} {choice}" for choice in ("greedy", "sampled") for shape in ("prefill 16", "prefill 32", "decode 256")
    ]
    assert len({Path(path).read_bytes() for path in traced.modules.values()}) == traced.num_graphs == 6
    assert traced.cache_bytes == 2 * NUM_LAYERS * 4 * 256 * 2 * 16 * 2


def test_cache_of_a_layer_with_a_window_counts_as_short_as_it_is(tmp_path: Path, windowed_model_folder: Path) -> None:
    """256 cells in the first layer, 48 in the second: the window of 8 and a row of 32, in units of 16."""
    traced = trace_graphs(request_for(windowed_model_folder, tmp_path, graphs=(DECODE,)))
    assert traced.cache_bytes == 2 * 4 * (256 + 48) * 2 * 16 * 2
    assert traced.cache_sizes == [4 * 48 * 2 * 16, 4 * 256 * 2 * 16]


@needs_compiler
def test_a_decode_step_compiles_for_a_tpu_and_updates_the_cache_in_place(config_folder: Path, tmp_path: Path) -> None:
    traced = trace_graphs(request_for(config_folder, tmp_path, graphs=(DECODE,)))
    results = compile_graphs(traced, CHIPS["v5e"], lambda *_: None)
    compiled = results[DECODE]
    assert isinstance(compiled, Compiled), compiled
    assert compiled.num_donors == compiled.num_aliased == 2 * NUM_LAYERS
    assert compiled.memory_bytes >= traced.weights_bytes + traced.cache_bytes


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
        (["--model-id", "missing", "--tpu", "v5e-1"], "missing is not a folder with a config.json"),
        (["--model-id", "missing", "--tpu", "v9-1"], "v9-1"),
        (["--model-id", "missing", "--tpu", "v5e-4", "--parallel", "tensor"], "--parallel tensor cannot be planned"),
    ],
)
def test_what_cannot_be_planned_is_a_usage_error(arguments: list[str], complaint: str) -> None:
    done = plan(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
