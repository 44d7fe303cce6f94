"""What makes a model folder complete, and what is taken from the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from tpu_tgi_server.config import Settings
from tpu_tgi_server.model import files
from tpu_tgi_server.model.files import WEIGHTS, WEIGHTS_INDEX, ModelFiles, find_config_folder, find_model_files

INDEX = json.dumps(
    {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors", "c": "model-2-of-2.safetensors"}}
)
SHARDS = {"model-1-of-2.safetensors": "", "model-2-of-2.safetensors": ""}


def folder_of(parent: Path, contents: dict[str, str]) -> Path:
    folder = parent / "model"
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def find(model: Path | str, **fields: Any) -> ModelFiles:
    return find_model_files(Settings(str(model), **fields))


@pytest.mark.parametrize("weights", [{WEIGHTS: ""}, {WEIGHTS_INDEX: INDEX, **SHARDS}])
def test_complete_folder_is_taken_as_it_is(tmp_path: Path, weights: dict[str, str]) -> None:
    folder = folder_of(tmp_path, {"config.json": "{}", **weights})
    before = sorted(tmp_path.rglob("*"))
    assert find(folder) == ModelFiles(folder, folder)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ({"README.md": ""}, "not a model: there is no config.json"),
        ({"config.json": "{}"}, "has no weights"),
        ({"config.json": "{}", "consolidated.safetensors": ""}, "has no weights"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, "convert them to safetensors"),
        (
            {"config.json": "{}", "pytorch_model.bin.index.json": "{}", "x-1-of-2.bin": ""},
            "convert them to safetensors",
        ),
        ({"config.json": "{}", WEIGHTS_INDEX: INDEX}, "incomplete: model-1-of-2.safetensors, model-2-of-2.safetensors"),
        ({"config.json": "{}", WEIGHTS_INDEX: INDEX, "model-1-of-2.safetensors": ""}, "incomplete: model-2-of-2"),
        ({"config.json": "{}", WEIGHTS_INDEX: "not JSON"}, "is not an index of weights"),
        ({"config.json": "{}", WEIGHTS_INDEX: "[]"}, "is not an index of weights"),
        ({"config.json": "{}", WEIGHTS_INDEX: '{"weight_map": {"a": "../x"}}'}, "outside of its folder"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "is a PEFT adapter"),
        ({"config.json": "{}", WEIGHTS: "", "adapter_config.json": "{}"}, "is a PEFT adapter"),
        ({"refs/main": "abc", "snapshots/abc/config.json": "{}"}, "give one of the folders in"),
    ],
)
def test_folder_that_cannot_be_served_is_refused_in_a_line(
    tmp_path: Path, contents: dict[str, str], complaint: str
) -> None:
    folder = folder_of(tmp_path, contents)
    with pytest.raises(OSError, match=complaint) as refusal:
        find(folder)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_overriding_folder_gives_the_weights_and_the_model_the_rest(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"config.json": "{}"})
    weights = folder_of(tmp_path / "other", {WEIGHTS: ""})
    assert find(folder, weights_cache_override=weights) == ModelFiles(folder, weights)
    with pytest.raises(OSError, match=f"{tmp_path} has no weights"):
        find(folder, weights_cache_override=tmp_path)


@pytest.mark.parametrize(
    ("name", "is_wanted"),
    [
        ("config.json", True),
        ("generation_config.json", True),
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("tekken.json", True),
        ("qwen.tiktoken", True),
        ("merges.txt", True),
        ("vocab.json", True),
        ("vocab.bpe", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tools.jinja", True),
        ("pytorch_model.bin", False),
        ("pytorch_model.bin.index.json", False),
        ("model.safetensors", False),
        ("consolidated.00.pth", False),
        ("onnx/config.json", False),
        ("README.md", False),
        ("modeling.py", False),
    ],
)
def test_small_files_are_config_and_tokenizer_at_the_top(name: str, is_wanted: bool) -> None:
    assert files._is_wanted(name, files.SMALL_FILES) is is_wanted


def cached(tmp_path: Path, **commits: str) -> Path:
    """A hub cache with the model org/name; each commit has a config that names it."""
    entry = tmp_path / "cache" / "models--org--name"
    (entry / "refs").mkdir(parents=True)
    for revision, commit in commits.items():
        (entry / "refs" / revision).write_text(commit)
        snapshot = entry / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"commit": commit}))
        (snapshot / WEIGHTS).touch()
    return tmp_path / "cache"


def test_offline_a_revision_is_found_in_the_cache(tmp_path: Path) -> None:
    cache = cached(tmp_path, main="a" * 40, older="b" * 40)
    snapshots = cache / "models--org--name" / "snapshots"
    for revision, commit in [(None, "a"), ("main", "a"), ("older", "b"), ("b" * 40, "b")]:
        folder = snapshots / (commit * 40)
        assert find("org/name", revision=revision, huggingface_hub_cache=cache) == ModelFiles(folder, folder)


@pytest.mark.parametrize(
    ("model", "revision", "complaint"),
    [
        ("org/other", None, "org/other is neither a folder nor in the cache, and HF_HUB_OFFLINE"),
        ("org/name", "newer", "org/name at newer is neither a folder nor in the cache"),
        ("/no/such/folder", None, "/no/such/folder is neither a folder nor the name of a model on the hub"),
    ],
)
def test_offline_what_is_missing_is_said(tmp_path: Path, model: str, revision: str | None, complaint: str) -> None:
    with pytest.raises(OSError, match=complaint):
        find(model, revision=revision, huggingface_hub_cache=cached(tmp_path, main="a" * 40))


def test_offline_an_incomplete_snapshot_is_refused(tmp_path: Path) -> None:
    cache = cached(tmp_path, main="a" * 40)
    (cache / "models--org--name" / "snapshots" / ("a" * 40) / WEIGHTS).unlink()
    with pytest.raises(OSError, match="has no weights"):
        find("org/name", huggingface_hub_cache=cache)


def test_where_the_config_is_enough_weights_are_neither_needed_nor_fetched(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"config.json": "{}"})
    assert find_config_folder(Settings(str(folder))) == folder
    cache = cached(tmp_path, main="a" * 40)
    snapshot = cache / "models--org--name" / "snapshots" / ("a" * 40)
    (snapshot / WEIGHTS).unlink()
    assert find_config_folder(Settings("org/name", huggingface_hub_cache=cache)) == snapshot


def test_where_the_config_is_enough_it_is_still_needed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="there is no config"):
        find_config_folder(Settings(str(folder_of(tmp_path, {"README.md": ""}))))
    with pytest.raises(OSError, match="org/name is neither a folder nor in the cache, and HF_HUB_OFFLINE"):
        find_config_folder(Settings("org/name", huggingface_hub_cache=tmp_path))
