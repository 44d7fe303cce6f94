"""The command that says what a model would need on a TPU, without one."""

import os
import tempfile
from dataclasses import replace
from typing import Annotated

import typer

from tpu_tgi_server.cli import options
from tpu_tgi_server.cli.serve import USAGE_ERROR
from tpu_tgi_server.config import Parallel, Settings, read_quantize, settings_from, tidy_environment
from tpu_tgi_server.plan.chips import Tpu


def plan(
    model_id: Annotated[
        str,
        typer.Option(
            "--model-id", help="A folder with a config.json, or a model on the hub. Weights are not looked at."
        ),
    ],
    tpu: Annotated[Tpu, typer.Option("--tpu", help="The TPU to compile for.")],
    revision: options.Revision = None,
    huggingface_hub_cache: options.HubCache = None,
    dtype: options.DtypeOption = None,
    quantize: options.QuantizeOption = None,
    max_batch_size: options.MaxBatchSize = None,
    max_total_tokens: options.MaxTotalTokens = None,
    max_input_tokens: options.MaxInputTokens = None,
    prefill_chunk_tokens: options.PrefillChunkTokens = None,
    trust_remote_code: options.TrustRemoteCode = None,
    parallel: Annotated[
        Parallel, typer.Option("--parallel", help="replica: a whole model on each chip; tensor: one over all chips.")
    ] = Parallel.REPLICA,
    all_graphs: Annotated[
        bool, typer.Option("--all", help="Compile every graph of the server. Default: the largest of each kind.")
    ] = False,
) -> None:
    """Compile the server's graphs for a TPU that need not be there, and say what they need."""
    if parallel is Parallel.AUTO:
        options.fail("--parallel auto cannot be planned: say replica or tensor", USAGE_ERROR)
    try:
        settings = settings_from(
            os.environ,
            model_id=model_id,
            revision=revision,
            huggingface_hub_cache=huggingface_hub_cache,
            dtype=dtype,
            quantize=quantize and read_quantize(quantize, "--quantize"),
            parallel=parallel,
            max_batch_size=max_batch_size,
            max_total_tokens=max_total_tokens,
            max_input_tokens=max_input_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            trust_remote_code=trust_remote_code,
        )
    except ValueError as error:
        options.fail(str(error), USAGE_ERROR)
    tidy_environment(os.environ)
    from tpu_tgi_server.plan.processes import PlanError

    try:
        is_good = print_plan(settings, tpu, all_graphs)
    except (PlanError, OSError) as error:
        options.fail(str(error), 1)
    if not is_good:
        raise typer.Exit(1)


def print_plan(settings: Settings, tpu: Tpu, all_graphs: bool) -> bool:
    """Whether everything fits.

    Raises:
        PlanError, OSError: there is no plan; the message says why.
    """
    from tpu_tgi_server.model.files import find_config_folder
    from tpu_tgi_server.plan.messages import TraceRequest
    from tpu_tgi_server.plan.processes import check_compiler, compile_graphs, trace_graphs
    from tpu_tgi_server.plan.report import fits, report

    check_compiler()
    if settings.parallel is Parallel.REPLICA:  # which divide the slots, as the server does
        settings = replace(settings, max_batch_size=-(-settings.max_batch_size // tpu.num_chips))
    with tempfile.TemporaryDirectory() as target:
        request = TraceRequest.from_settings(
            settings,
            find_config_folder(settings),
            target,
            num_cores=tpu.num_chips if settings.parallel is Parallel.TENSOR else 1,
            largest_only=not all_graphs,
        )
        traced = trace_graphs(request)
        results = compile_graphs(traced, tpu.chip, report_progress)
    for line in report(tpu, settings.max_batch_size, traced, results):
        typer.echo(line)
    return fits(tpu, traced, results)


def report_progress(name: str, number: int, total: int) -> None:
    """One line a graph, beside the result and not in it."""
    typer.echo(f"compiled {name} ({number}/{total})", err=True)
