"""The commands. They turn words into settings and call the rooms below; nothing is decided here."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from loguru import logger

from tpu_tgi_server.config import Device, Dtype, Settings, resolve_device
from tpu_tgi_server.logs import configure_logging

serve_command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
tools_command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@serve_command.command()
def serve(
    model_id: Annotated[str, typer.Option(help="A model folder, or the name of a model on the hub.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit on the hub. Default: the main branch.")
    ] = None,
    uds_path: Annotated[
        Path, typer.Option(help="The server listens on the unix socket UDS_PATH-0.")
    ] = Settings.uds_path,
    device: Annotated[
        Device,
        typer.Option(
            help="auto takes PJRT_DEVICE if it is set, else a TPU if the host has one, else cpu. "
            "cpu is plain torch; xla-cpu runs the TPU's graphs on the CPU, for tests."
        ),
    ] = Settings.device,
    dtype: Annotated[Dtype, typer.Option(help="auto is bfloat16 on a TPU and float32 elsewhere.")] = Settings.dtype,
    max_batch_size: Annotated[
        int, typer.Option(help="Slots: how many requests run at once. More wait for a slot.")
    ] = Settings.max_batch_size,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt and answer together, the length of a slot. Default: 2048, or what the model has."),
    ] = Settings.max_total_tokens,
    max_input_tokens: Annotated[
        int | None, typer.Option(help="The longest prompt. Default: one less than MAX_TOTAL_TOKENS.")
    ] = Settings.max_input_tokens,
    step_timeout: Annotated[
        float, typer.Option(help="Seconds that one step may take before the server counts as hung and ends.")
    ] = Settings.step_timeout_s,
    watermark_gamma: Annotated[
        float, typer.Option(envvar="WATERMARK_GAMMA", help="Watermark: the share of the vocabulary that is favoured.")
    ] = Settings.watermark_gamma,
    watermark_delta: Annotated[
        float, typer.Option(envvar="WATERMARK_DELTA", help="Watermark: what is added to the logits of favoured tokens.")
    ] = Settings.watermark_delta,
    logger_level: Annotated[
        str, typer.Option(help="TRACE, DEBUG, INFO, WARNING, ERROR or OFF.")
    ] = Settings.logger_level,
    json_output: Annotated[
        bool, typer.Option("--json-output", help="Log one JSON object a line, as TGI's launcher reads it.")
    ] = Settings.json_output,
) -> None:
    """Serve a model to text-generation-inference's router over gRPC (generate.v2) on a unix socket."""
    try:
        configure_logging(logger_level, json_output)
        settings = Settings(
            model_id=model_id,
            revision=revision,
            uds_path=uds_path,
            device=resolve_device(device, os.environ),
            dtype=dtype,
            max_batch_size=max_batch_size,
            max_total_tokens=max_total_tokens,
            max_input_tokens=max_input_tokens,
            step_timeout_s=step_timeout,
            watermark_gamma=watermark_gamma,
            watermark_delta=watermark_delta,
            logger_level=logger_level,
            json_output=json_output,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run_server(settings))


def run_server(settings: Settings) -> int:
    """Serve until told to stop; the exit status."""
    from tpu_tgi_server.progress import progress_display
    from tpu_tgi_server.service.lifecycle import serve as serve_until_stopped

    is_terminal = sys.stdout.isatty() and not settings.json_output
    try:
        return asyncio.run(serve_until_stopped(settings, progress_display(is_terminal)))
    except ValueError as error:
        logger.error("{}", error)
        return 1


@tools_command.callback()
def tools() -> None:
    """Tools around a running server."""


@tools_command.command()
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts, answered together. Default: the lines of standard input."),
    ] = None,
    uds_path: Annotated[Path, typer.Option(help="The server's socket is UDS_PATH-0.")] = Settings.uds_path,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Wrap each prompt in the model's chat template, or send it as it is."),
    ] = True,
) -> None:
    """Ask a running server and print the answers as they come."""
    from tpu_tgi_server.client.generate import ClientError
    from tpu_tgi_server.client.generate import generate as ask

    texts = prompts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not texts:
        raise typer.BadParameter("no prompt: give some as arguments or as lines on standard input")
    try:
        asyncio.run(ask(texts, Path(f"{uds_path}-0"), max_new_tokens, chat))
    except ClientError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def serve_app() -> None:
    """The console script tpu-tgi-serve."""
    serve_command()


def tools_app() -> None:
    """The console script tpu-tgi."""
    tools_command()


if __name__ == "__main__":
    serve_app()
