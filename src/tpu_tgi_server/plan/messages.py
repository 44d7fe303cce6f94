"""What the planning process and its two helpers, one that traces and one that compiles, say to each other."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_tgi_server.config import Settings

REFERENCE = "reference"
"""The name of the graph of `plan.reference` among the server's own."""


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Attributes:
        folder: holds config.json; nothing else of it is read.
        target: an existing folder for the modules.
        num_cores: over how many cores the model is spread.
        quantize: "int8" or None.
        graphs: names as in `str(Graph)`, or "reference"; empty for all graphs of the server.
        largest_only: of each kind of graph, take the largest alone.
    """

    folder: str
    target: str
    num_slots: int
    num_cores: int = 1
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    prefill_chunk_tokens: int | None = None
    dtype: str = "auto"
    quantize: str | None = None
    trust_remote_code: bool = False
    graphs: tuple[str, ...] = ()
    largest_only: bool = False

    @classmethod
    def from_settings(
        cls, settings: Settings, folder: Path, target: str, num_cores: int, largest_only: bool
    ) -> "TraceRequest":
        """What a server with these settings would run."""
        return cls(
            folder=str(folder),
            target=target,
            num_slots=settings.max_batch_size,
            num_cores=num_cores,
            max_input_tokens=settings.max_input_tokens,
            max_total_tokens=settings.max_total_tokens,
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            dtype=settings.dtype,
            quantize=settings.quantize,
            trust_remote_code=settings.trust_remote_code,
            largest_only=largest_only,
        )


@dataclass(frozen=True)
class Module:
    """One graph that is to be compiled.

    Attributes:
        path: a file with the serialised HloModuleProto.
        donors, parameter_axes, result_axes: see `runtime.tracing.LoweredStep`.
    """

    path: str
    donors: list[int]
    parameter_axes: list[int | None]
    result_axes: list[int | None]


@dataclass(frozen=True)
class Traced:
    """What was traced. Bytes are those of each core, without the padding of the chip's layout.

    Attributes:
        modules: by the graph's name.
        num_graphs: how many the server would compile in all.
        num_cores: over how many cores the model is spread.
        weights_bytes: every weight once.
        streamed_bytes: of those what a decode step reads: without an embedding table that is looked up in only.
        cache_bytes: keys and values of all slots.
        cache_sizes: numbers of elements that a core has of the cache's tensors.
        num_cache_buffers: how many they are.
    """

    modules: dict[str, Module]
    num_graphs: int
    num_cores: int
    max_input_tokens: int
    max_total_tokens: int
    dtype: str
    weights_bytes: int
    streamed_bytes: int
    cache_bytes: int
    cache_sizes: list[int]
    num_cache_buffers: int

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Traced":
        """From what `asdict` and JSON have made of it."""
        modules = {name: Module(**module) for name, module in fields["modules"].items()}
        return cls(**(fields | {"modules": modules}))


@dataclass(frozen=True)
class Compiled:
    """What libtpu's compiler says of one graph on one chip. Nothing is measured on a TPU.

    Attributes:
        num_donors: buffers that torch_xla offers for overwriting.
        num_aliased: of those what the compiler does overwrite.
        argument_bytes: weights, cache and inputs, in the layout and padding of the chip.
        code_bytes: the program itself.
        accessed_bytes: all that the instructions read and write, on-chip memory included.
        num_cache_copies: instructions that copy a whole tensor of the cache within main memory.
        num_collectives: instructions by which the cores exchange data, by their kind.
        collective_bytes: what those of a kind leave on each core together.
    """

    num_donors: int
    num_aliased: int
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    code_bytes: int
    accessed_bytes: float
    flops: float
    num_cache_copies: int
    compile_s: float
    num_collectives: dict[str, int] = field(default_factory=dict)
    collective_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """What must be in the chip's memory while the graph runs, without the programs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes
