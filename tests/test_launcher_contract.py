"""TGI's launcher starts a real shard, reads its log, and ends it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launcher import SERVE_ALWAYS, SERVE_OPTIONAL, Shard, shard_environment
from tests.servers import ROOT
from tests.tiny_model import MAX_POSITIONS


@contextmanager
def shard(folder: Path, model: Path, *options: str, **variables: str) -> Iterator[Shard]:
    """A shard that is started with what the launcher always passes, and what is given."""
    environment = shard_environment(ROOT / "src", HF_HUB_OFFLINE="1", **variables)
    words = ["serve", str(model), "--uds-path", str(folder / "uds"), *SERVE_ALWAYS, *options]
    running = Shard(words, folder / "uds", environment)
    try:
        yield running
    finally:
        running.close()


def test_shard_starts_with_what_the_launcher_always_passes(tmp_path: Path, tiny_model_folder: Path) -> None:
    with shard(tmp_path, tiny_model_folder) as running:
        running.wait_until_ready()
        records, errors = running.stop()
    assert errors == ""
    assert {level for level, _ in records} == {"INFO"}
    size = f"8 slots of {MAX_POSITIONS} tokens, prompts up to {MAX_POSITIONS - 1} tokens, float32 on cpu"
    assert size in [text for _, text in records]


def test_shard_starts_with_all_that_the_launcher_may_add_and_no_record_is_lost(
    tmp_path: Path, tiny_model_folder: Path
) -> None:
    options = [word for option in SERVE_OPTIONAL for word in option]
    sizes = {"MAX_BATCH_SIZE": "3", "MAX_TOTAL_TOKENS": "128", "MAX_INPUT_TOKENS": "100"}
    watermark = {"WATERMARK_GAMMA": "0.25", "WATERMARK_DELTA": "1.5"}
    folders = {"HUGGINGFACE_HUB_CACHE": str(tmp_path), "WEIGHTS_CACHE_OVERRIDE": str(tiny_model_folder)}
    ignored = {"REQUEST_LOGPROBS": "1", "DISABLE_CUSTOM_KERNELS": "True", "HF_TOKEN": "token"}
    variables = {**sizes, **watermark, **folders, **ignored, "LORA_ADAPTERS": "", "PJRT_DEVICE": ""}
    with shard(tmp_path, tiny_model_folder, *options, "--logger-level", "TRACE", **variables) as running:
        running.wait_until_ready()
        records, errors = running.stop()
    assert errors == ""
    warnings = [text for level, text in records if level not in ("TRACE", "DEBUG", "INFO")]
    assert warnings == [
        "--otlp-endpoint is ignored: the server sends no traces",
        f"--revision main is ignored: {tiny_model_folder} is a folder",
    ]
    assert "3 slots of 128 tokens, prompts up to 64 tokens, bfloat16 on cpu" in [text for _, text in records]
    assert f"serving on {running.socket}" in [text for _, text in records]


@pytest.mark.parametrize(("level", "shown"), [("WARN", {"WARNING"}), ("OFF", set())])
def test_level_of_the_launcher_is_obeyed(tmp_path: Path, tiny_model_folder: Path, level: str, shown: set[str]) -> None:
    with shard(tmp_path, tiny_model_folder, "--revision", "x", "--logger-level", level) as running:
        running.wait_until_ready()
        records, errors = running.stop()
    assert errors == ""
    assert {level for level, _ in records} == shown


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_model_that_needs_its_own_code_is_refused_and_nobody_is_asked(
    tmp_path: Path, tiny_model_folder: Path, part: str
) -> None:
    model = model_with_code(tmp_path, tiny_model_folder, {part})
    with shard(tmp_path, model) as refused:
        records, _ = refused.read_to_the_end(1)
    (error,) = [text for level, text in records if level == "ERROR"]
    assert error == (
        f"could not start: {model} needs code that comes with the model: read it, and if you trust it, "
        "give --trust-remote-code"
    )
    assert not (tmp_path / "code-ran").exists()


def test_code_of_a_trusted_model_runs(tmp_path: Path, tiny_model_folder: Path) -> None:
    model = model_with_code(tmp_path, tiny_model_folder, {"config", "tokenizer"})
    with shard(tmp_path, model, "--trust-remote-code", HF_HOME=str(tmp_path / "home")) as running:
        running.wait_until_ready()
        running.stop()
    assert (tmp_path / "code-ran").exists()


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path("{mark}").touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def model_with_code(folder: Path, tiny_model: Path, parts: set[str]) -> Path:
    """The tiny model, with classes of its own for its config and model, or its tokenizer, or both."""
    model = folder / "model-with-code"
    shutil.copytree(tiny_model, model)
    (model / "own.py").write_text(OWN_CODE.format(mark=folder / "code-ran"))
    if "config" in parts:
        classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        _change(model / "config.json", model_type="own", auto_map=classes)
    if "tokenizer" in parts:
        classes_of_tokenizer = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        _change(model / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes_of_tokenizer)
    return model


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
