"""What each option and variable of TGI's launcher becomes: a setting, a warning, or a refusal in a sentence."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from tests.launcher import SERVE_ALWAYS, SERVE_OPTIONAL, SERVE_REFUSED, shard_environment
from tpu_tgi_server.cli import launcher_app
from tpu_tgi_server.config import Device, Dtype, Quantize, Settings

ALWAYS = Settings("model", uds_path=Path("/tmp/uds"), device=Device.CPU, json_output=True)


class Launcher:
    """Owns what the last call of the shard's command came to: its settings, its warnings, its exit status."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.settings: Settings | None = None
        self.warnings: list[str] = []
        module = sys.modules["tpu_tgi_server.cli.serve"]
        monkeypatch.setattr(module, "run_server", self._run)
        monkeypatch.setattr(module, "configure_logging", lambda *_: None)
        monkeypatch.setattr(logger, "warning", self.warnings.append)

    def serve(self, *options: str, **variables: str) -> int:
        """Call `text-generation-server serve` as the launcher does; the exit status."""
        environment = shard_environment(Path("/nowhere"), **variables)
        words = ["text-generation-server", "serve", "model", "--uds-path", "/tmp/uds", *SERVE_ALWAYS, *options]
        self._monkeypatch.setattr(os, "environ", environment)
        self._monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            launcher_app()
        status: int = end.value.code  # type: ignore[assignment]
        return status

    def _run(self, settings: Settings) -> int:
        self.settings = settings
        return 0


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return Launcher(monkeypatch)


def changed(**fields: Any) -> Settings:
    from dataclasses import replace

    return replace(ALWAYS, **fields)


OBEYED = {
    "--trust-remote-code": changed(trust_remote_code=True),
    "--dtype float16": changed(dtype=Dtype.FLOAT16),
    "--dtype bfloat16": changed(dtype=Dtype.BFLOAT16),
    "--revision main": changed(revision="main"),
    "--max-input-tokens 64": changed(max_input_tokens=64),
}
WARNED = {"--otlp-endpoint http://127.0.0.1:4317": "--otlp-endpoint is ignored: the server sends no traces"}


@pytest.mark.parametrize("option", [(), *SERVE_OPTIONAL], ids=" ".join)
def test_optional_option_is_obeyed_or_ignored(launcher: Launcher, option: tuple[str, ...]) -> None:
    words = " ".join(option)
    assert launcher.serve(*option, PJRT_DEVICE="") == 0
    assert launcher.settings == OBEYED.get(words, ALWAYS)
    assert launcher.warnings == [WARNED[words] for _ in [0] if words in WARNED]


@pytest.mark.parametrize("option", SERVE_REFUSED, ids=" ".join)
def test_option_that_cannot_be_obeyed_is_refused_in_a_sentence(
    launcher: Launcher, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.serve(*option) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert " ".join(option) in errors


@pytest.mark.parametrize("level", ["TRACE", "DEBUG", "INFO", "WARN", "ERROR", "OFF"])
def test_level_of_the_launcher_is_taken(launcher: Launcher, level: str) -> None:
    assert launcher.serve("--logger-level", level) == 0
    assert launcher.settings == changed(logger_level=level)


@pytest.mark.parametrize(
    ("variables", "fields"),
    [
        ({"MAX_BATCH_SIZE": "3", "MAX_TOTAL_TOKENS": "128"}, {"max_batch_size": 3, "max_total_tokens": 128}),
        ({"MAX_INPUT_TOKENS": "100"}, {"max_input_tokens": 100}),
        ({"WATERMARK_GAMMA": "0.25", "WATERMARK_DELTA": "1.5"}, {"watermark_gamma": 0.25, "watermark_delta": 1.5}),
        ({"HUGGINGFACE_HUB_CACHE": "/data"}, {"huggingface_hub_cache": Path("/data")}),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HUB_CACHE": "/b"}, {"huggingface_hub_cache": Path("/b")}),
        ({"WEIGHTS_CACHE_OVERRIDE": "/weights"}, {"weights_cache_override": Path("/weights")}),
        ({"HF_API_TOKEN": "a"}, {"hf_token": "a"}),
        ({"HF_API_TOKEN": "a", "HF_TOKEN": "b"}, {"hf_token": "b"}),
        ({"PJRT_DEVICE": "TPU"}, {"device": Device.TPU}),
        ({"QUANTIZATION": "int8"}, {"quantize": Quantize.INT8}),
        ({"QUANTIZATION": "1"}, {"quantize": Quantize.INT8}),
        ({"QUANTIZATION": "0"}, {}),
        ({"REQUEST_LOGPROBS": "1", "DISABLE_CUSTOM_KERNELS": "True"}, {}),
        (dict.fromkeys(["MAX_BATCH_SIZE", "HF_TOKEN", "WORLD_SIZE", "LORA_ADAPTERS", "ROPE_FACTOR"], ""), {}),
    ],
    ids=str,
)
def test_variable_is_a_setting_and_an_empty_one_is_not_set(
    launcher: Launcher, variables: dict[str, str], fields: dict[str, Any]
) -> None:
    assert launcher.serve(**variables) == 0
    assert launcher.settings == changed(**fields)
    assert launcher.warnings == []


def test_flag_wins_over_its_variable(launcher: Launcher) -> None:
    assert launcher.serve("--max-input-tokens", "64", MAX_INPUT_TOKENS="100") == 0
    assert launcher.settings == changed(max_input_tokens=64)


def test_int8_is_taken_as_a_flag_too(launcher: Launcher) -> None:
    assert launcher.serve("--quantize", "int8") == 0
    assert launcher.settings == changed(quantize=Quantize.INT8)


def test_token_is_not_in_the_text_of_the_settings() -> None:
    assert "hf_secret" not in str(Settings("model", hf_token="hf_secret"))


@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        ({"WORLD_SIZE": "4", "RANK": "1"}, "start the launcher with --num-shard 1"),
        ({"LORA_ADAPTERS": "a,b=c"}, "merge the adapter into its model"),
        ({"ROPE_SCALING": "linear", "ROPE_FACTOR": "1.0"}, "put the scaling into the model's config.json"),
        ({"MAX_BATCH_SIZE": "many"}, "MAX_BATCH_SIZE must be a whole number, not 'many'"),
        ({"WATERMARK_DELTA": "much"}, "WATERMARK_DELTA must be a number, not 'much'"),
        ({"WATERMARK_GAMMA": "2"}, "WATERMARK_GAMMA must be more than 0 and less than 1"),
        ({"WATERMARK_GAMMA": "nan"}, "WATERMARK_GAMMA must be more than 0 and less than 1"),
        ({"WATERMARK_DELTA": "1e30"}, "WATERMARK_DELTA must be a number from -1000 to 1000"),
        ({"WATERMARK_DELTA": "inf"}, "WATERMARK_DELTA must be a number from -1000 to 1000"),
        ({"QUANTIZATION": "awq"}, "QUANTIZATION awq is not supported, only int8 is"),
        ({"PJRT_DEVICE": "CUDA"}, "PJRT_DEVICE=CUDA is not supported: use TPU or CPU"),
    ],
    ids=str,
)
def test_variable_that_cannot_be_obeyed_is_refused_in_a_sentence(
    launcher: Launcher, variables: dict[str, str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.serve(**variables) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert advice in errors


@pytest.mark.parametrize("words", [[], ["model", "--model-id", "model"]])
def test_one_model_must_be_given(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["text-generation-server", "serve", *words])
    with pytest.raises(SystemExit, match="2"):
        launcher_app()
    assert capsys.readouterr().err == "error: give one model: a folder, or the name of a model on the hub\n"
