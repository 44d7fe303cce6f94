"""The process that compiles: `python -m tpu_tgi_server.plan.compile CHIP NUM_CORES CACHE_SIZE...`.

Each line of its input is a `Module` as JSON, and it answers each with a line of JSON: the fields of `Compiled`, or an
error. It uses libtpu's compile-only client through jax, which needs no TPU, and is a process of its own because libtpu
may abort it.
"""

import io
import json
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpu_tgi_server.plan import hlo
from tpu_tgi_server.plan.chips import HOSTS
from tpu_tgi_server.plan.messages import Compiled, Module


def compile_only_devices(chip: str, num_cores: int) -> list[Any]:
    """The chips of one host that is not there."""
    from jax.experimental import topologies

    rows, columns = HOSTS[num_cores]
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip}:{rows}x{columns}", chips_per_host_bounds=[rows, columns, 1]
    )
    return list(topology.devices)


def with_annotations(module: Module, num_cores: int) -> bytes:
    """A module as MLIR bytecode with what torch_xla tells XLA beside it: donors, and what is spread over the cores.

    They are written as attributes of the entry function, as jax writes its own.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import _jax, xla_client

    computation = xla_client.XlaComputation(Path(module.path).read_bytes())
    with mlir.make_ir_context():
        parsed = ir.Module.parse(_jax.mlir.xla_computation_to_mlir_module(computation))
        main = next(function for function in parsed.body.operations if function.sym_name.value == "main")

        def spread(types: Sequence[Any], axes: Sequence[int | None]) -> list[dict[str, Any]]:
            """The attribute of each parameter or result. On one core there is nothing to say."""
            if num_cores == 1:
                return [{} for _ in types]
            ranks = [len(ir.RankedTensorType(kind).shape) for kind in types]
            texts = [sharding(axis, rank, num_cores) for axis, rank in zip(axes, ranks, strict=True)]
            return [{"mhlo.sharding": ir.StringAttr.get(text)} for text in texts]

        arguments = spread(main.type.inputs, module.parameter_axes)
        for donor in module.donors:
            arguments[donor]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in arguments])
        results = spread(main.type.results, module.result_axes)
        main.result_attrs = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in results])
        buffer = io.BytesIO()
        parsed.operation.write_bytecode(buffer)
    return buffer.getvalue()


def sharding(axis: int | None, rank: int, num_cores: int) -> str:
    """XLA's text for a tensor that is spread over a row of cores along an axis, or that each of them has whole."""
    if axis is None:
        return "{replicated}"
    counts = ",".join(str(num_cores if number == axis else 1) for number in range(rank))
    return f"{{devices=[{counts}]{','.join(map(str, range(num_cores)))}}}"


def compile_options(devices: Sequence[Any]) -> Any:
    """One program for all devices, made by XLA's partitioner (GSPMD), as with torch_xla."""
    import numpy as np
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.num_partitions = len(devices)
    build = options.executable_build_options
    build.num_partitions = len(devices)
    build.use_spmd_partitioning = len(devices) > 1
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id for device in devices]]))
    return options


def compile_module(module: Module, devices: Sequence[Any], cache_sizes: Collection[int]) -> Compiled:
    """Compile for some chips; what is found is that of each of them.

    Raises:
        RuntimeError: the compiler refuses the program, for instance because it does not fit the chip's memory.
    """
    from jaxlib import xla_client

    annotated = with_annotations(module, len(devices))
    start = time.monotonic()
    executable = devices[0].client.compile(annotated, xla_client.DeviceList(tuple(devices)), compile_options(devices))
    compile_s = time.monotonic() - start
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    text = executable.hlo_modules()[0].to_string()
    num_collectives, collective_bytes = hlo.collectives(text)
    return Compiled(
        num_donors=len(module.donors),
        num_aliased=hlo.num_aliased(text),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        accessed_bytes=cost["bytes accessed"],
        flops=cost["flops"],
        num_cache_copies=hlo.num_copies(text, cache_sizes),
        compile_s=compile_s,
        num_collectives=num_collectives,
        collective_bytes=collective_bytes,
    )


def main(chip: str, num_cores: str, *cache_sizes: str) -> None:
    """Serve until the input ends."""
    devices = compile_only_devices(chip, int(num_cores))
    for line in sys.stdin:
        try:
            answer = asdict(compile_module(Module(**json.loads(line)), devices, [*map(int, cache_sizes)]))
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
