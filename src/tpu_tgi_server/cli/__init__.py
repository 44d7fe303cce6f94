"""The commands. They turn words into settings and call the rooms below; nothing is decided here.

One file holds one command, `options.py` describes every option once.
"""

import typer

from tpu_tgi_server.cli.download import download_weights
from tpu_tgi_server.cli.generate import generate
from tpu_tgi_server.cli.plan import plan
from tpu_tgi_server.cli.serve import serve


def serve_app() -> None:
    """The console script tpu-tgi-serve."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    app()


def launcher_app() -> None:
    """The console script text-generation-server, which TGI's launcher calls. It draws no boxes into the logs."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)
    app.callback()(_launcher_help)
    app.command()(serve)
    app.command()(download_weights)
    app()


def tools_app() -> None:
    """The console script tpu-tgi."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
    app.callback()(_tools_help)
    app.command()(generate)
    app.command()(plan)
    app()


def _launcher_help() -> None:
    """What text-generation-inference's launcher calls: fetch the weights, then serve them."""


def _tools_help() -> None:
    """Tools around the server: ask a running one, or plan one for a TPU."""
