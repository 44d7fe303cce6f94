"""loguru set-up, the same in every process.

One record is one `write` of at most PIPE_BUF bytes, so POSIX keeps records of several processes apart on a shared
pipe without a lock. A longer text goes on in the next record.
"""

import json
import logging
import os
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

MAX_RECORD_BYTES = 4096
"""PIPE_BUF on Linux: a write of up to this many bytes to a pipe is atomic."""

MAX_TEXT_BYTES = 600
"""A byte of UTF-8 takes at most 6 bytes in JSON, which leaves room for the rest of the record."""

STDOUT = 1

_LOGGER_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_OFF = 1000


def configure_logging(level: str, json_output: bool) -> None:
    """Send all records of this process at `level` and above to standard output.

    Levels are loguru's names, and the Rust names that TGI's launcher sends (`WARN`, `OFF`). The JSON shape is the one
    that the launcher parses: `text`, and `record.level.name`.

    Raises:
        ValueError: `level` is not a level.
    """
    _hold_stdout()
    logger.remove()
    name = level.upper()
    minimum: str | int = _OFF if name == "OFF" else _LOGGER_LEVELS.get(name, name)
    logger.add(
        _write_json if json_output else _write_text,
        level=minimum,
        format="{message}",
        backtrace=True,
        diagnose=False,  # it would print the values of variables: prompts and answers
    )
    logging.basicConfig(handlers=[_ToLoguru()], level=logging.WARNING, force=True)


def _hold_stdout() -> None:
    """If the program was started without a standard output, keep its number from being given to a socket or a file."""
    try:
        os.fstat(STDOUT)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
        os.set_inheritable(STDOUT, True)  # for the agent; dup2 does nothing if open() has returned this very number


def _write_json(message: "Message") -> None:
    record = message.record
    for text in _pieces(str(message).rstrip()):
        _write_line(json.dumps({"text": text, "record": _facts(record)}))


def _write_text(message: "Message") -> None:
    record = message.record
    head = f"{record['time']:YYYY-MM-DD HH:mm:ss.SSS} {record['level'].name:<8} "
    for text in _pieces(str(message).rstrip()):
        _write_line(head + text)


def _facts(record: "Record") -> dict[str, object]:
    return {
        "level": {"name": record["level"].name, "no": record["level"].no},
        "time": record["time"].isoformat(),
        "name": record["name"],
        "line": record["line"],
        "process": record["process"].id,
    }


def _pieces(text: str) -> list[str]:
    """Split `text` so that a record of any piece stays below MAX_RECORD_BYTES, never inside a character."""
    pieces, piece, size = [], "", 0
    for character in text:
        width = len(character.encode(errors="replace"))
        if size + width > MAX_TEXT_BYTES:
            pieces.append(piece)
            piece, size = "", 0
        piece += character
        size += width
    return [*pieces, piece]


def _write_line(line: str) -> None:
    os.write(STDOUT, (line + "\n").encode(errors="replace"))


class _ToLoguru(logging.Handler):
    """Owns nothing: passes records of the standard library's `logging` (transformers, grpc) on to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level: str | int = logger.level(record.levelname).name
        except ValueError:
            level = record.levelno
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a library's mistake in its own log call
            message = str(record.msg)
        logger.opt(exception=record.exc_info).log(level, message)
