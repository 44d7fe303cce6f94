"""How answers look on a pipe and on a terminal."""

import io

import pytest
from rich.console import Console
from rich.live import Live

from tpu_tgi_server.client.display import AnswerDisplay, LabelledLines, LiveBlocks, PlainStream, open_display


def test_one_answer_is_a_plain_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(["prompt"]) as display:
        assert isinstance(display, PlainStream)
        display.add(0, "Hel")
        assert capsys.readouterr().out == "Hel"
        display.add(0, "lo\nyou")
        display.finish(0)
    assert capsys.readouterr().out == "lo\nyou\n"


def test_several_answers_are_labelled_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with open_display(["one", "two"]) as display:
        assert isinstance(display, LabelledLines)
        write_interleaved(display)
    assert capsys.readouterr().out.splitlines() == ["[1] > one", "[2] > two", "[2] B", "[1] A1", "[1] A2", "[2] C"]


def test_lines_go_out_when_they_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    display = LabelledLines(["one", "two"])
    capsys.readouterr()
    display.add(0, "half a li")
    assert capsys.readouterr().out == ""
    display.add(0, "ne\n\nnext")
    assert capsys.readouterr().out == "[1] half a line\n"


def test_terminal_shows_all_answers_in_blocks() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    prompts = ["one", "two"]
    with Live(console=console, auto_refresh=False) as live:
        write_interleaved(LiveBlocks(live, prompts))
        with console.capture() as capture:
            console.print(live.renderable)
    lines = [line.strip() for line in Console(file=io.StringIO()).render_str(capture.get()).plain.splitlines()]
    assert [line for line in lines if not line.startswith("\x1b")] == ["A1", "A2", "", "B", "C", ""]


def write_interleaved(display: AnswerDisplay) -> None:
    display.add(0, "A")
    display.add(1, "B\n")
    display.add(0, "1\nA2")
    display.finish(0)
    display.add(1, "C")
    display.finish(1)
