"""The process that compiles: `python -m tpu_tgi_server.plan.compile CHIP`, the path of a module on each input line.

It answers each with one line of JSON: the fields of `Compiled`, or an error. It uses libtpu's compile-only client
through jax, which needs no TPU, and is a process of its own because libtpu may abort it.
"""

import io
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpu_tgi_server.plan import hlo
from tpu_tgi_server.plan.messages import Compiled


def compile_only_device(chip: str) -> Any:
    """One chip of a topology that is not there."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{chip}:1x1", chips_per_host_bounds=[1, 1, 1]
    )
    return topology.devices[0]


def with_donors(module: bytes) -> tuple[bytes, int]:
    """An HloModuleProto as MLIR bytecode, and how many donors it has.

    jaxlib's conversion drops the buffer donors without a word, so they are put back as jax's own attributes.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import _jax, xla_client

    computation = xla_client.XlaComputation(module)
    donors = hlo.buffer_donors(computation.as_hlo_text())
    converted = _jax.mlir.xla_computation_to_mlir_module(computation)
    with mlir.make_ir_context():
        parsed = ir.Module.parse(converted)
        main = next(function for function in parsed.body.operations if function.sym_name.value == "main")
        attributes = list(main.arg_attrs)
        for number in donors:
            named = {entry.name: entry.attr for entry in attributes[number]}
            attributes[number] = ir.DictAttr.get(named | {"jax.buffer_donor": ir.BoolAttr.get(True)})
        main.arg_attrs = ir.ArrayAttr.get(attributes)
        buffer = io.BytesIO()
        parsed.operation.write_bytecode(buffer)
    return buffer.getvalue(), len(donors)


def compile_module(module: bytes, device: Any, cache_sizes: list[int]) -> Compiled:
    """Compile for one chip.

    Raises:
        RuntimeError: the compiler refuses the program, for instance because it does not fit the chip's memory.
    """
    import numpy as np
    from jaxlib import xla_client

    converted, num_donors = with_donors(module)
    options = xla_client.CompileOptions()
    options.executable_build_options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
    start = time.monotonic()
    executable = device.client.compile(converted, xla_client.DeviceList((device,)), options)
    compile_s = time.monotonic() - start
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    text = executable.hlo_modules()[0].to_string()
    return Compiled(
        num_donors=num_donors,
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
    )


def main(chip: str, *cache_sizes: str) -> None:
    """Serve until the input ends."""
    device = compile_only_device(chip)
    for line in sys.stdin:
        try:
            answer = asdict(compile_module(Path(line.strip()).read_bytes(), device, [*map(int, cache_sizes)]))
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
