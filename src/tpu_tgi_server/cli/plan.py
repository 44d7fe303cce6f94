"""The command that says what a model would need on a TPU, without one."""

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tpu_tgi_server.cli import options
from tpu_tgi_server.cli.serve import USAGE_ERROR
from tpu_tgi_server.config import Dtype, settings_from
from tpu_tgi_server.plan.chips import Tpu

REPLICA = "replica"


def plan(
    model_id: Annotated[str, typer.Option("--model-id", help="A folder with a config.json; weights are not read.")],
    tpu: Annotated[Tpu, typer.Option("--tpu", help="The TPU to compile for.")],
    dtype: options.DtypeOption = None,
    max_batch_size: options.MaxBatchSize = None,
    max_total_tokens: options.MaxTotalTokens = None,
    max_input_tokens: options.MaxInputTokens = None,
    trust_remote_code: options.TrustRemoteCode = None,
    parallel: Annotated[str, typer.Option("--parallel", help="replica: a whole model on each chip.")] = REPLICA,
    all_graphs: Annotated[
        bool, typer.Option("--all", help="Compile every graph of the server. Default: the largest of each kind.")
    ] = False,
) -> None:
    """Compile the server's graphs for a TPU that need not be there, and say what they need."""
    if parallel != REPLICA:
        options.fail(
            f"--parallel {parallel} cannot be planned: only graphs of one chip can, with the whole model", USAGE_ERROR
        )
    if not (Path(model_id) / "config.json").is_file():
        options.fail(f"{model_id} is not a folder with a config.json", USAGE_ERROR)
    try:
        settings = settings_from(
            os.environ,
            model_id=model_id,
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_total_tokens=max_total_tokens,
            max_input_tokens=max_input_tokens,
            trust_remote_code=trust_remote_code,
        )
    except ValueError as error:
        options.fail(str(error), USAGE_ERROR)

    from rich.console import Console

    from tpu_tgi_server.plan.messages import TraceRequest
    from tpu_tgi_server.plan.processes import PlanError, check_compiler, compile_graphs, trace_graphs
    from tpu_tgi_server.plan.report import print_plan

    try:
        check_compiler()
        with tempfile.TemporaryDirectory() as target:
            request = TraceRequest(
                folder=model_id,
                target=target,
                num_slots=settings.max_batch_size,
                max_input_tokens=settings.max_input_tokens,
                max_total_tokens=settings.max_total_tokens,
                dtype=Dtype(settings.dtype).value,
                trust_remote_code=settings.trust_remote_code,
                largest_only=not all_graphs,
            )
            traced = trace_graphs(request)
            results = compile_graphs(traced, tpu.chip, report_progress)
    except PlanError as error:
        options.fail(str(error), 1)
    if not print_plan(Console(), tpu, settings.max_batch_size, traced, results):
        raise typer.Exit(1)


def report_progress(name: str, number: int, total: int) -> None:
    """One line a graph, beside the result and not in it."""
    typer.echo(f"compiled {name} ({number}/{total})", err=True)
