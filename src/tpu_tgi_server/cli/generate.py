"""The command that asks a running server."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tpu_tgi_server.cli import options
from tpu_tgi_server.config import Settings
from tpu_tgi_server.logs import STDOUT


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts, answered together. Default: the lines of standard input."),
    ] = None,
    uds_path: options.UdsPath = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Wrap each prompt in the model's chat template, or send it as it is."),
    ] = True,
) -> None:
    """Ask a running server and print the answers as they come."""
    from tpu_tgi_server.client.generate import ClientError
    from tpu_tgi_server.client.generate import generate as ask

    texts = prompts or _lines_of_stdin()
    if not texts:
        raise typer.BadParameter("no prompt: give some as arguments or as lines on standard input")
    try:
        asyncio.run(ask(texts, Path(f"{uds_path or Settings.uds_path}-0"), max_new_tokens, chat))
    except ClientError as error:
        options.fail(str(error), 1)
    except OSError as error:
        _forget_unwritten_output()
        if isinstance(error, BrokenPipeError):  # the reader has what it wanted
            raise typer.Exit(1) from error
        options.fail(f"the answer cannot be written: {error.strerror}", 1)


def _lines_of_stdin() -> list[str]:
    if sys.stdin is None:
        return []
    try:
        return [line for line in sys.stdin.read().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not text: {error}") from error


def _forget_unwritten_output() -> None:
    """Or Python would try once more at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
