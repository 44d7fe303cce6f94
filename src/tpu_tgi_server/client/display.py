"""Answers on a screen while they grow: one as a plain stream, several side by side."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Group
from rich.live import Live
from rich.text import Text


class AnswerDisplay(Protocol):
    """Takes pieces of the answers to prompts 0, 1, 2, ... as they come."""

    def add(self, row: int, piece: str) -> None: ...

    def finish(self, row: int) -> None: ...


@contextmanager
def open_display(prompts: list[str]) -> Iterator[AnswerDisplay]:
    """What fits: a stream for one prompt; for several, live blocks on a terminal and labelled lines elsewhere."""
    if len(prompts) == 1:
        yield PlainStream()
    elif sys.stdout.isatty():
        with Live(refresh_per_second=10, vertical_overflow="visible") as live:
            yield LiveBlocks(live, prompts)
    else:
        yield LabelledLines(prompts)


class PlainStream:
    """Owns nothing: every piece goes out at once."""

    def add(self, row: int, piece: str) -> None:
        print(piece, end="", flush=True)

    def finish(self, row: int) -> None:
        print(flush=True)


class LabelledLines:
    """Owns the unfinished line of each answer; a line goes out, labelled, when it is complete."""

    def __init__(self, prompts: list[str]) -> None:
        self._pending = [""] * len(prompts)
        for number, prompt in enumerate(prompts, start=1):
            print(f"[{number}] > {prompt}", flush=True)

    def add(self, row: int, piece: str) -> None:
        *complete, self._pending[row] = (self._pending[row] + piece).split("\n")
        for line in complete:
            self._print(row, line)

    def finish(self, row: int) -> None:
        self._print(row, self._pending[row])

    def _print(self, row: int, line: str) -> None:
        if line:
            print(f"[{row + 1}] {line}", flush=True)


class LiveBlocks:
    """Owns the text of every answer so far, and redraws them together."""

    def __init__(self, live: Live, prompts: list[str]) -> None:
        self._live = live
        self._prompts = prompts
        self._answers = [""] * len(prompts)
        self._draw()

    def add(self, row: int, piece: str) -> None:
        self._answers[row] += piece
        self._draw()

    def finish(self, row: int) -> None:
        self._draw()

    def _draw(self) -> None:
        blocks = [
            Text.assemble((f"> {prompt}\n", "bold"), answer, "\n")
            for prompt, answer in zip(self._prompts, self._answers, strict=True)
        ]
        self._live.update(Group(*blocks))
