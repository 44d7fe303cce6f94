"""download-weights as TGI's launcher calls it, against a folder, a cache and a hub on this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_hub import MODEL, TOKEN, FakeHub, fake_hub
from tests.servers import ROOT
from tpu_tgi_server.config import Settings
from tpu_tgi_server.model.files import WEIGHTS, WEIGHTS_INDEX, find_model_files

COMMAND = "from tpu_tgi_server.cli import launcher_app; launcher_app()"
ALWAYS = ["--extension", ".safetensors", "--logger-level", "INFO", "--json-output"]
LAUNCHER_ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ENABLE_HF_TRANSFER": "1"}
SHARDS = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
SMALL = {"config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"x", "merges.txt": b"y"}
UNNEEDED = {
    "README.md": b"",
    "pytorch_model.bin": b"",
    "onnx/config.json": b"",
    "consolidated.safetensors": b"",
    "modeling.py": b"pass",
}
SINGLE = {**SMALL, **UNNEEDED, WEIGHTS: b"weights"}


def download(
    cache: Path, model: str, *options: str, setup: str = "", **environment: str
) -> "subprocess.CompletedProcess[str]":
    variables = {**LAUNCHER_ENVIRONMENT, "HUGGINGFACE_HUB_CACHE": str(cache), "HOME": str(cache), **environment}
    return subprocess.run(
        [sys.executable, "-c", setup + COMMAND, "download-weights", model, *ALWAYS, *options],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"PYTHONPATH": str(ROOT / "src"), **variables},
        check=False,
    )


def texts(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    "options", [[], ["--merge-lora"], ["--merge-lora", "--revision", "main", "--trust-remote-code"]]
)
def test_folder_that_is_read_only_is_left_alone(tmp_path: Path, tiny_model_folder: Path, options: list[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny_model_folder.iterdir()}
    mode = tiny_model_folder.stat().st_mode
    tiny_model_folder.chmod(0o555)
    try:
        done = download(tmp_path, str(tiny_model_folder), *options)
    finally:
        tiny_model_folder.chmod(mode)
    assert (done.returncode, done.stderr) == (0, "")
    warned = [f"--revision main is ignored: {tiny_model_folder} is a folder"] if "--revision" in options else []
    assert texts(done) == [*warned, f"{tiny_model_folder} is complete in {tiny_model_folder}"]
    assert {path: path.stat().st_mtime_ns for path in tiny_model_folder.iterdir()} == before


def test_only_what_serving_needs_is_fetched_and_a_second_call_fetches_nothing(tmp_path: Path) -> None:
    with fake_hub(FakeHub(SINGLE)) as hub:
        done = download(tmp_path, MODEL, "--merge-lora", HF_ENDPOINT=hub.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(hub.fetched) == sorted([*SMALL, WEIGHTS])
        assert sum("downloading: " in text for text in texts(done)) == 5
        done = download(tmp_path, MODEL, "--merge-lora", HF_ENDPOINT=hub.url)
        assert done.returncode == 0
        assert len(hub.fetched) == 5
    offline = download(tmp_path, MODEL, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stderr) == (0, "")
    files = find_model_files(Settings(MODEL, huggingface_hub_cache=tmp_path))
    assert texts(offline) == [f"{MODEL} is complete in {files.folder}"]
    assert names_in(files.folder) == {*SMALL, WEIGHTS}


def test_sharded_weights_come_with_their_index_and_code_only_if_it_is_trusted(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
    sharded = {
        **SMALL,
        **UNNEEDED,
        WEIGHTS_INDEX: index,
        SHARDS[0]: b"1",
        SHARDS[1]: b"2",
        "model-old.safetensors": b"old",
    }
    with fake_hub(FakeHub(sharded)) as hub:
        done = download(tmp_path, MODEL, "--trust-remote-code", "--revision", hub.commit, HF_ENDPOINT=hub.url)
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(hub.fetched) == sorted([*SMALL, WEIGHTS_INDEX, *SHARDS, "modeling.py"])


def test_overridden_weights_are_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / WEIGHTS).touch()
    with fake_hub(FakeHub(SINGLE)) as hub:
        override = str(tmp_path / "weights")
        done = download(tmp_path, MODEL, HF_ENDPOINT=hub.url, WEIGHTS_CACHE_OVERRIDE=override)
        assert (done.returncode, done.stderr) == (0, "")
        assert sorted(hub.fetched) == sorted(SMALL)


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HF_API_TOKEN"])
def test_gated_model_needs_a_token_and_the_hub_s_reason_reaches_stderr(tmp_path: Path, variable: str) -> None:
    with fake_hub(FakeHub(SINGLE, is_gated=True)) as hub:
        done = download(tmp_path, MODEL, HF_ENDPOINT=hub.url)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: cannot fetch {MODEL}: 401 Client Error")
        assert "Access to this model is restricted: ask for it" in done.stderr
        assert done.stderr.count("\n") == 1
        done = download(tmp_path, MODEL, HF_ENDPOINT=hub.url, **{variable: TOKEN})
        assert done.returncode == 0
        assert TOKEN not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [("org/other", [], "Repository Not Found"), (MODEL, ["--revision", "nowhere"], "Invalid rev id")],
)
def test_what_the_hub_does_not_have_is_said_at_once(
    tmp_path: Path, model: str, options: list[str], reason: str
) -> None:
    with fake_hub(FakeHub(SINGLE)) as hub:
        done = download(tmp_path, model, *options, HF_ENDPOINT=hub.url)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot fetch")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert texts(done) == []


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "convert them to safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "is a PEFT adapter"),
    ],
)
def test_model_that_cannot_be_served_is_refused_before_it_is_fetched(
    tmp_path: Path, contents: dict[str, bytes], complaint: str
) -> None:
    with fake_hub(FakeHub(contents)) as hub:
        done = download(tmp_path, MODEL, "--merge-lora", HF_ENDPOINT=hub.url)
        assert (done.returncode, hub.fetched) == (1, [])
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_hub_that_fails_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    with fake_hub(FakeHub(SINGLE, num_failures=1)) as hub:
        done = download(tmp_path, MODEL, HF_ENDPOINT=hub.url)
        assert (done.returncode, done.stderr) == (0, "")
    assert "try 1 of 5 failed" in texts(done)[0]


def test_hub_that_stays_away_leaves_what_is_in_the_cache(tmp_path: Path) -> None:
    impatient = "from tpu_tgi_server.model import hub; hub.FIRST_WAIT_S = 0.01; "
    with fake_hub(FakeHub(SINGLE)) as hub:
        assert download(tmp_path, MODEL, HF_ENDPOINT=hub.url).returncode == 0
    gone = {"HF_ENDPOINT": hub.url, "HF_HUB_ENABLE_HF_TRANSFER": "", "setup": impatient}
    done = download(tmp_path, MODEL, **gone)
    assert (done.returncode, done.stderr) == (0, "")
    assert texts(done)[-2].startswith(f"taking {MODEL} from the cache: cannot fetch {MODEL}: ")
    done = download(tmp_path / "empty", MODEL, **gone)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot fetch {MODEL}: ")


def test_empty_variables_count_as_not_set(tmp_path: Path) -> None:
    with fake_hub(FakeHub(SINGLE)) as hub:
        empty = {
            "HF_HUB_CACHE": "",
            "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "",
            "WEIGHTS_CACHE_OVERRIDE": "",
            "LORA_ADAPTERS": "",
        }
        done = download(tmp_path, MODEL, HF_ENDPOINT=hub.url, **empty)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "models--org--name").is_dir()


def test_other_formats_than_safetensors_are_refused(tmp_path: Path) -> None:
    done = download(tmp_path, "m", "--extension", ".bin")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --extension .bin is not supported: weights must be .safetensors\n",
    )
