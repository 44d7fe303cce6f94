"""Every setting of the server, in one frozen object that is built once and passed by constructor.

It knows names, defaults and what values are legal; it knows nothing of gRPC, models or devices. Nothing else in the
package reads the environment for settings.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107
"""gRPC refuses longer unix socket paths (the size of sun_path on Linux, less the final zero)."""

MIN_CHUNK_TOKENS = 16
MAX_CHUNK_TOKENS = 8192
"""The details of so many prompt tokens still fit a response of 4 MiB."""
MAX_DECODE_STEPS = 16


MAX_TIMEOUT_S = 1_000_000.0
"""poll(2) counts milliseconds in 31 bits, which is 24 days."""

MAX_WATERMARK_DELTA = 1000.0
"""Added to a logit, a larger number leaves a float32 too few digits to tell the favoured tokens apart."""


class Device(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    TPU = "tpu"
    XLA_CPU = "xla-cpu"
    CPU = "cpu"


class Dtype(StrEnum):
    """The number format of weights, activations and KV cache."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantize(StrEnum):
    """How linear layers keep their weights, if not in the model's dtype."""

    INT8 = "int8"


class Parallel(StrEnum):
    """How several cores or chips share the work."""

    AUTO = "auto"
    REPLICA = "replica"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Settings:
    """What the operator asked for. `None` means: derive it from the model once its config is read.

    Raises:
        ValueError: a value is out of range or two of them contradict; the message names the flag.
    """

    model_id: str
    revision: str | None = None
    trust_remote_code: bool = False
    huggingface_hub_cache: Path | None = None
    weights_cache_override: Path | None = None
    hf_token: str | None = field(default=None, repr=False)
    uds_path: Path = Path("/tmp/text-generation-server")
    device: Device = Device.AUTO
    dtype: Dtype = Dtype.AUTO
    quantize: Quantize | None = None
    parallel: Parallel = Parallel.AUTO
    replicas: int | None = None
    max_batch_size: int = 8
    max_total_tokens: int | None = None
    max_input_tokens: int | None = None
    prefill_chunk_tokens: int = 512
    decode_steps: int = 1
    step_ahead: bool = True
    skip_warmup: bool = False
    compilation_cache: Path | None = None
    profile: Path | None = None
    step_timeout_s: float = 600.0
    load_timeout_s: float = 1800.0
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    logger_level: str = "INFO"
    json_output: bool = False

    def __post_init__(self) -> None:
        if self.replicas is not None:
            if self.replicas < 1:
                raise ValueError("--replicas must be at least 1")
            if self.replicas > 1 and self.parallel is Parallel.TENSOR:
                raise ValueError("--replicas and --parallel tensor exclude each other: choose one")
        if self.parallel is Parallel.TENSOR and self.device is Device.CPU:
            raise ValueError("--parallel tensor needs --device tpu or xla-cpu: plain torch has one core")
        if self.max_batch_size < 1:
            raise ValueError("--max-batch-size must be at least 1")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ValueError("--max-total-tokens must be at least 2: one token of prompt, one of answer")
        if self.max_input_tokens is not None:
            if self.max_input_tokens < 1:
                raise ValueError("--max-input-tokens must be at least 1")
            if self.max_total_tokens is not None and self.max_input_tokens >= self.max_total_tokens:
                raise ValueError("--max-input-tokens must be less than --max-total-tokens")
        if not MIN_CHUNK_TOKENS <= self.prefill_chunk_tokens <= MAX_CHUNK_TOKENS:
            raise ValueError(f"--prefill-chunk-tokens must be from {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS}")
        if not 1 <= self.decode_steps <= MAX_DECODE_STEPS:
            raise ValueError(f"--decode-steps must be from 1 to {MAX_DECODE_STEPS}")
        for flag, seconds in (("--step-timeout", self.step_timeout_s), ("--load-timeout", self.load_timeout_s)):
            if not 0 < seconds <= MAX_TIMEOUT_S:
                raise ValueError(f"{flag} must be more than 0 seconds and at most {MAX_TIMEOUT_S:.0f}")
        if not 0 < self.watermark_gamma < 1:
            raise ValueError("--watermark-gamma or WATERMARK_GAMMA must be more than 0 and less than 1")
        if not abs(self.watermark_delta) <= MAX_WATERMARK_DELTA:
            largest = f"{MAX_WATERMARK_DELTA:g}"
            raise ValueError(f"--watermark-delta or WATERMARK_DELTA must be a number from -{largest} to {largest}")
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"--uds-path is too long: a socket path has at most {MAX_SOCKET_PATH_BYTES} bytes")

    @property
    def socket_path(self) -> Path:
        """The socket that this shard listens on: the prefix, a dash and the rank, as TGI's launcher expects it."""
        return Path(f"{self.uds_path.absolute()}-0")


def read_quantize(text: str, name: str) -> Quantize:
    """The one way of quantizing that there is.

    Raises:
        ValueError: another one was asked for.
    """
    if text not in set(Quantize):
        raise ValueError(
            f"{name} {text} is not supported, only int8 is: leave it out, or, if it is in the config.json, "
            "choose a model that is not quantized"
        )
    return Quantize(text)


def read_quantize_variable(text: str) -> Quantize | None:
    """optimum-tpu's variable, 1 for int8. (TGI's launcher itself reads QUANTIZE, and ends if that is int8.)

    Raises:
        ValueError: it is neither that, nor 0, nor int8.
    """
    return {"1": Quantize.INT8, "0": None}[text] if text in ("0", "1") else read_quantize(text, "QUANTIZATION")


@dataclass(frozen=True)
class Variable:
    """A setting's place in the environment: the first of `names` that is set, and not empty, counts."""

    names: tuple[str, ...]
    read: Callable[[str], object]


VARIABLES = {
    "parallel": Variable(("PARALLEL",), Parallel),
    "replicas": Variable(("REPLICAS",), int),
    "max_batch_size": Variable(("MAX_BATCH_SIZE",), int),
    "max_total_tokens": Variable(("MAX_TOTAL_TOKENS",), int),
    "max_input_tokens": Variable(("MAX_INPUT_TOKENS",), int),
    "prefill_chunk_tokens": Variable(("PREFILL_CHUNK_TOKENS",), int),
    "decode_steps": Variable(("DECODE_STEPS",), int),
    "step_ahead": Variable(("STEP_AHEAD",), lambda text: text.lower() in ("1", "true")),
    "quantize": Variable(("QUANTIZATION",), read_quantize_variable),
    "skip_warmup": Variable(("SKIP_WARMUP",), lambda text: text.lower() in ("1", "true")),
    "huggingface_hub_cache": Variable(("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"), Path),
    "weights_cache_override": Variable(("WEIGHTS_CACHE_OVERRIDE",), Path),
    "hf_token": Variable(("HF_TOKEN", "HF_API_TOKEN"), str),
    "watermark_gamma": Variable(("WATERMARK_GAMMA",), float),
    "watermark_delta": Variable(("WATERMARK_DELTA",), float),
}
"""The settings that the environment can give. TGI's launcher passes some of its options only this way."""

ONE_PROCESS = "one process drives all chips: start the launcher with --num-shard 1 and without --sharded"

REFUSED_VARIABLES = {
    "LORA_ADAPTERS": "LoRA adapters are not supported: merge the adapter into its model and serve that, "
    "without --lora-adapters",
    "ROPE_SCALING": "--rope-scaling is not supported: put the scaling into the model's config.json",
    "ROPE_FACTOR": "--rope-factor is not supported: put the scaling into the model's config.json",
}
"""What an operator asked of the launcher, and must not believe to have."""

NOISY_VARIABLES = ("HF_HUB_ENABLE_HF_TRANSFER",)
"""Always set by the launcher; huggingface_hub ignores it, with a warning on stderr at every start."""


def settings_from(environment: Mapping[str, str], **given: object) -> Settings:
    """Settings from flags and environment: a flag that is not None wins over a variable, a variable over the default.

    Raises:
        ValueError: a value is illegal, or the environment asks for something that does not exist here.
    """
    if environment.get("WORLD_SIZE", "") not in ("", "1"):
        raise ValueError(ONE_PROCESS)
    for name, sentence in REFUSED_VARIABLES.items():
        if environment.get(name):
            raise ValueError(sentence)
    values = {name: value for name, value in given.items() if value is not None}
    for field_name, variable in VARIABLES.items():
        found = next((name for name in variable.names if environment.get(name)), None)
        if found and field_name not in values:
            values[field_name] = _read(found, environment[found], variable.read)
    return Settings(**values)  # type: ignore[arg-type]


def _read(name: str, text: str, read: Callable[[str], object]) -> object:
    try:
        return read(text)
    except ValueError as error:
        if read not in (int, float, Parallel):
            raise
        raise ValueError(f"{name} must be {_kind(read)}, not {text!r}") from error


def _kind(read: Callable[[str], object]) -> str:
    """What a variable must be, in words."""
    if isinstance(read, type) and issubclass(read, StrEnum):
        return " or ".join(read)
    return "a whole number" if read is int else "a number"


def tidy_environment(environment: MutableMapping[str, str]) -> None:
    """Take away what would mislead libraries that read the environment: variables set to nothing, and noise."""
    empty = [
        name for name, value in environment.items() if not value and name.startswith(("HF_", "HUGGINGFACE_", "PJRT_"))
    ]
    for name in (*empty, *NOISY_VARIABLES):
        environment.pop(name, None)


def resolve_device(device: Device, environment: Mapping[str, str], dev_folder: Path = Path("/dev")) -> Device:
    """Turn `auto` into a device: what PJRT_DEVICE says, else a TPU if its device files exist, else plain torch.

    Raises:
        ValueError: PJRT_DEVICE names something that is neither TPU nor CPU.
    """
    if device is not Device.AUTO:
        return device
    pjrt_device = environment.get("PJRT_DEVICE")
    if pjrt_device:
        known = {"TPU": Device.TPU, "CPU": Device.XLA_CPU}
        if pjrt_device not in known:
            raise ValueError(f"PJRT_DEVICE={pjrt_device} is not supported: use TPU or CPU, or give --device")
        return known[pjrt_device]
    # accel0 on v4 and older hosts, vfio/0 on v5e and newer; a bare /dev/vfio/vfio exists without any TPU
    has_tpu = any(dev_folder.glob("accel[0-9]*")) or any((dev_folder / "vfio").glob("[0-9]*"))
    return Device.TPU if has_tpu else Device.CPU
