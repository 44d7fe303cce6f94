"""XLA on the CPU that writes down what it would compile and computes nothing: the graphs of a TPU, without one.

Every step is traced in a forked copy of the process. The copy ends as soon as XLA has written down the module that it
was about to compile, before any optimisation and with the buffers that it may overwrite; so weights and cache need no
values, and no memory either: they are host pages that nobody touches.
"""

import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch_xla
from torch import Tensor
from torch_xla.utils.dlpack import from_dlpack

from tpu_tgi_server.runtime.interface import StepResultT

MIN_PLACEHOLDER_BYTES = 1 << 16
"""Smaller tensors are copied to the device like those of the server."""
ALIGNMENT_BYTES = 64
"""XLA refuses to borrow host memory that is less aligned than this."""
SECONDS_BETWEEN_LOOKS = 0.01
MAX_TRACE_SECONDS = 300.0


class TracingRuntime:
    """Owns the folder that XLA writes to. Make one before anything touches a device of torch_xla.

    Attributes:
        module: of the step that was called last, a serialised HloModuleProto.
    """

    is_compiled = True
    device_type = "xla"
    default_dtype = torch.bfloat16

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tpu-tgi-plan-")
        os.environ["PJRT_DEVICE"] = "CPU"
        flags = f"--xla_dump_to={self._folder.name} --xla_dump_hlo_as_proto"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        self.module = b""

    @property
    def device(self) -> torch.device:
        device: torch.device = torch_xla.device()
        return device

    def launch(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call `function` right here."""
        function(0, *arguments)

    def free_memory_bytes(self) -> None:
        """Unknown: what fits is for the TPU's compiler to say."""

    def to_device(self, host: Tensor, split_axis: int | None = None) -> Tensor:  # noqa: ARG002 - there is one core
        """Lend the host's pages to XLA: pages of a tensor that nobody has written to take no memory."""
        if host.nbytes < MIN_PLACEHOLDER_BYTES or host.data_ptr() % ALIGNMENT_BYTES:
            return host.to(self.device)
        placeholder: Tensor = from_dlpack(host)
        return placeholder

    @property
    def num_cores(self) -> int:
        """A plan is for one core."""
        return 1

    def gather(self, device: Tensor) -> None:
        """One core has everything."""

    def tune(self, model: torch.nn.Module) -> None:
        """Nothing to do, as on a TPU."""

    def to_host(self, device: Tensor) -> Tensor:
        """Zeros are on the host already."""
        return device

    def prepare(
        self,
        step: Callable[..., StepResultT],
        in_place: Sequence[Tensor],  # noqa: ARG002 - XLA finds them by itself when a step is not replayed
    ) -> Callable[..., StepResultT]:
        """A step that, when it is called, is traced into `module` and returns zeros.

        A call raises RuntimeError if the step cannot be traced; the message has the traceback.
        """

        def call(*arguments: Any) -> StepResultT:
            shapes = self._trace(step, arguments)
            zeros = tuple(torch.zeros(shape) for shape in shapes)
            result: StepResultT = zeros if len(zeros) > 1 else zeros[0]  # type: ignore[assignment]
            return result

        return call

    def _trace(self, step: Callable[..., Any], arguments: tuple[Any, ...]) -> list[list[int]]:
        """Trace one step into `module`; the shapes of its results."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _trace(step, arguments, writer)
        os.close(writer)
        try:
            with os.fdopen(reader) as report:
                first = report.readline()
                if not first.startswith("["):
                    raise RuntimeError(f"a step cannot be traced: {first}{report.read()}")
            self.module = self._wait_for_module(child)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self._empty_folder()
        shapes: list[list[int]] = json.loads(first)
        return shapes

    def num_compilations(self) -> int:
        """Nothing is ever compiled to the end."""
        return 0

    def _wait_for_module(self, child: int) -> bytes:
        deadline = time.monotonic() + MAX_TRACE_SECONDS
        while time.monotonic() < deadline:
            found = list(Path(self._folder.name).glob("*before_optimizations.hlo.pb"))
            module = module_of(found[0].read_bytes()) if found else None
            if module is not None:
                return module
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                raise RuntimeError("a step cannot be traced: XLA ended before it wrote the module down")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        raise RuntimeError(f"a step cannot be traced: XLA wrote no module in {MAX_TRACE_SECONDS:.0f} seconds")

    def _empty_folder(self) -> None:
        for path in Path(self._folder.name).iterdir():
            path.unlink()


def _trace(step: Callable[..., Any], arguments: tuple[Any, ...], writer: int) -> NoReturn:
    """Life of the forked copy: it reports the results' shapes or an error, and is killed while it compiles."""
    with os.fdopen(writer, "w") as report:
        try:
            with torch.no_grad():
                result = step(*arguments)
            results = result if isinstance(result, tuple) else (result,)
            report.write(json.dumps([list(tensor.shape) for tensor in results]) + "\n")
        except Exception:
            report.write(f"\n{traceback.format_exc()}")
            report.flush()
            os._exit(1)
    torch_xla.sync()
    os._exit(0)


def module_of(dump: bytes) -> bytes | None:
    """The HloModuleProto in an HloProto, whose first field it is; None if the file is not complete yet."""
    if len(dump) < 2:
        return None
    if dump[0] != 0x0A:
        raise ValueError("not an HloProto: it does not begin with a module")
    length, position, shift = 0, 1, 0
    while position < len(dump):
        byte = dump[position]
        length |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            end = position + length
            return dump[position:end] if end <= len(dump) else None
    return None
