"""What the planning process and its two helpers, one that traces and one that compiles, say to each other."""

from dataclasses import dataclass

REFERENCE = "reference"
"""The name of the graph of `plan.reference` among the server's own."""


@dataclass(frozen=True)
class TraceRequest:
    """What to trace.

    Attributes:
        folder: holds config.json; nothing else of it is read.
        target: an existing folder for the modules.
        graphs: names as in `str(Graph)`, or "reference"; empty for all graphs of the server.
        largest_only: of each kind of graph, take the largest alone.
    """

    folder: str
    target: str
    num_slots: int
    max_input_tokens: int | None = None
    max_total_tokens: int | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    graphs: tuple[str, ...] = ()
    largest_only: bool = False


@dataclass(frozen=True)
class Traced:
    """What was traced.

    Attributes:
        modules: file of the serialised HloModuleProto, by the graph's name.
        num_graphs: how many the server would compile in all.
        weights_bytes: every weight once.
        streamed_bytes: of those what a decode step reads: without an embedding table that is looked up in only.
        cache_bytes: keys and values of all slots.
        cache_sizes: numbers of elements of the cache's tensors.
        num_cache_buffers: how many they are.
    """

    modules: dict[str, str]
    num_graphs: int
    max_input_tokens: int
    max_total_tokens: int
    dtype: str
    weights_bytes: int
    streamed_bytes: int
    cache_bytes: int
    cache_sizes: list[int]
    num_cache_buffers: int


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

    @property
    def memory_bytes(self) -> int:
        """What must be in the chip's memory while the graph runs, without the programs."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes
