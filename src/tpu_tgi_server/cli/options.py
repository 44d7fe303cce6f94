"""Every option of the commands, described once. None means: not given, so the environment or the default counts."""

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from tpu_tgi_server.config import VARIABLES, Device, Dtype, Parallel, Settings


def _setting(name: str, help: str, default: str | None = None) -> Any:
    """An option for a field of Settings; its help ends with the variable that also sets it."""
    if name in VARIABLES:
        help += f" Environment: {' or '.join(VARIABLES[name].names)}."
    flag = "--" + name.removesuffix("_s").replace("_", "-")
    return typer.Option(flag, help=help, show_default=str(getattr(Settings, name)) if default is None else default)


ModelId = Annotated[
    str | None, typer.Argument(metavar="MODEL_ID", help="A model folder, or the name of a model on the hub.")
]
ModelIdOption = Annotated[str | None, typer.Option("--model-id", help="The same, as an option.")]
Revision = Annotated[str | None, _setting("revision", "Branch, tag or commit on the hub.", "main")]
TrustRemoteCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Run Python code that comes with the model. Default: refuse.")
]
HubCache = Annotated[
    Path | None, _setting("huggingface_hub_cache", "Folder for models from the hub.", "huggingface_hub's")
]
WeightsOverride = Annotated[
    Path | None, _setting("weights_cache_override", "Folder to take the weights from.", "with the model")
]
UdsPath = Annotated[Path | None, _setting("uds_path", "The server's unix socket is UDS_PATH-0.")]
DeviceOption = Annotated[
    Device | None,
    _setting(
        "device",
        "auto takes PJRT_DEVICE if it is set, else a TPU if the host has one, else cpu. "
        "cpu is plain torch; xla-cpu runs the TPU's graphs on the CPU, for tests.",
    ),
]
DtypeOption = Annotated[Dtype | None, _setting("dtype", "auto is bfloat16 on a TPU and float32 elsewhere.")]
QuantizeOption = Annotated[
    str | None,
    _setting("quantize", "int8 keeps the weights of linear layers in one byte each. Others are refused.", "off"),
]
ParallelOption = Annotated[
    Parallel | None,
    _setting(
        "parallel",
        "How several chips share the work: replica gives each a model of its own, tensor splits one. "
        "auto takes replica if the model and its slots fit one chip.",
    ),
]
Replicas = Annotated[
    int | None,
    _setting("replicas", "How many models run side by side.", "every chip where --parallel comes to replica, else 1"),
]
MaxBatchSize = Annotated[
    int | None, _setting("max_batch_size", "Slots: how many requests run at once. More wait for a slot.")
]
MaxTotalTokens = Annotated[
    int | None,
    _setting("max_total_tokens", "Prompt and answer together, the length of a slot.", "2048, or what the model has"),
]
MaxInputTokens = Annotated[
    int | None, _setting("max_input_tokens", "The longest prompt.", "one less than --max-total-tokens")
]
PrefillChunkTokens = Annotated[
    int | None,
    _setting("prefill_chunk_tokens", "Prompt tokens prefilled at once: running streams wait no longer than for these."),
]
DecodeSteps = Annotated[
    int | None, _setting("decode_steps", "Tokens that one Decode computes for each request before the host sees them.")
]
StepAhead = Annotated[
    bool | None,
    typer.Option(
        "--step-ahead/--no-step-ahead",
        help="Compute the next step while the router handles the last. Default: on. Environment: STEP_AHEAD.",
        show_default=False,
    ),
]
SkipWarmup = Annotated[
    bool | None,
    typer.Option(
        "--skip-warmup",
        help="Answer Warmup without compiling: graphs compile when they are first needed. Default: off. "
        "Environment: SKIP_WARMUP.",
    ),
]
CompilationCache = Annotated[
    Path | None,
    _setting(
        "compilation_cache",
        "Folder for compiled graphs, so that a later start need not compile them again.",
        "tpu-tgi-server in XDG_CACHE_HOME or ~/.cache on a TPU, none elsewhere",
    ),
]
Profile = Annotated[
    Path | None,
    _setting("profile", "Write where the time goes to this file, for a browser's trace viewer.", "no profile"),
]
StepTimeout = Annotated[
    float | None,
    _setting("step_timeout_s", "Seconds that one step may take before its process counts as hung and is replaced."),
]
LoadTimeout = Annotated[
    float | None,
    _setting("load_timeout_s", "Seconds that one stage of loading the model, or one file of it, may take."),
]
WatermarkGamma = Annotated[
    float | None, _setting("watermark_gamma", "Watermark: the share of the vocabulary that is favoured.")
]
WatermarkDelta = Annotated[
    float | None, _setting("watermark_delta", "Watermark: what is added to the logits of favoured tokens.")
]
LoggerLevel = Annotated[str | None, _setting("logger_level", "TRACE, DEBUG, INFO, WARN, WARNING, ERROR or OFF.")]
JsonOutput = Annotated[
    bool | None, typer.Option("--json-output", help="Log one JSON object a line, as TGI's launcher reads it.")
]

LAUNCHER = "What only TGI's launcher gives"


def _launcher(flag: str, help: str) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=LAUNCHER, show_default=False)


Sharded = Annotated[bool, _launcher("--sharded", "Refused: one process drives all chips.")]
Speculate = Annotated[int, _launcher("--speculate", "Refused if more than 0: there is no speculation.")]
KvCacheDtype = Annotated[str, _launcher("--kv-cache-dtype", "Refused if not auto: the cache has the model's dtype.")]
OtlpEndpoint = Annotated[str | None, _launcher("--otlp-endpoint", "Ignored with a warning: no traces are sent.")]
OtlpServiceName = Annotated[str | None, _launcher("--otlp-service-name", "Ignored.")]
Extension = Annotated[str, _launcher("--extension", "The format of the weights: .safetensors and no other.")]
MergeLora = Annotated[bool, _launcher("--merge-lora", "Ignored: adapters are refused.")]


def fail(sentence: str, status: int) -> NoReturn:
    """End the command with a sentence on stderr, which TGI's launcher shows when a process fails."""
    typer.echo(f"error: {sentence}", err=True)
    raise typer.Exit(status)
