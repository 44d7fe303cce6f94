"""loguru set-up, the same in every process.

One record is one `write` of at most PIPE_BUF bytes, so POSIX keeps records of several processes apart on a shared
pipe without a lock. A longer text goes on in the next record.

An exception's text may quote a prompt or an answer, so it is in records below INFO only; at INFO and above a record has
the exception's type and where it came from.
"""

import json
import logging
import os
import traceback
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

MAX_RECORD_BYTES = 4096
"""PIPE_BUF on Linux: a write of up to this many bytes to a pipe is atomic."""

MAX_TEXT_BYTES = 600
"""A byte of UTF-8 takes at most 6 bytes in JSON, which leaves room for the rest of the record."""

STDIN, STDOUT, STDERR = 0, 1, 2

LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "SUCCESS": 25, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
"""The levels that TGI's launcher knows. It drops a record of any other."""

_LOGGER_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_OFF = 1000


def configure_logging(level: str, json_output: bool) -> None:
    """Send all records of this process at `level` and above to standard output.

    Levels are loguru's names, and the Rust names that TGI's launcher sends (`WARN`, `OFF`). The JSON shape is the one
    that the launcher parses: `text`, and `record.level.name`.

    Raises:
        ValueError: `level` is not a level.
    """
    name = level.upper()
    if name not in (*LEVELS, *_LOGGER_LEVELS, "OFF"):
        raise ValueError(f"--logger-level must be TRACE, DEBUG, INFO, WARN, WARNING, ERROR or OFF, not {level!r}")
    _hold_standard_streams()
    logger.remove()
    minimum: str | int = _OFF if name == "OFF" else _LOGGER_LEVELS.get(name, name)
    logger.add(
        _write_json if json_output else _write_text,
        level=minimum,
        format=_format,
        backtrace=True,
        diagnose=False,  # it would print the values of variables: prompts and answers
    )
    logging.basicConfig(handlers=[_ToLoguru()], level=logging.WARNING, force=True)


def origin(error: BaseException) -> str:
    """The type of an exception and where it was raised, for those who may not see its text."""
    kind = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{kind} in {_place(os.path.basename(frames[-1].filename), frames[-1])}" if frames else kind


def _place(file: str, frame: traceback.FrameSummary) -> str:
    return f"{file}:{frame.lineno} {frame.name}"


def _format(record: "Record") -> str:
    """The template of a record; loguru fills it in."""
    exception = record["exception"]
    if exception is None or exception.value is None:
        return "{message}"
    if record["level"].no < LEVELS["INFO"]:
        return "{message}\n{exception}"
    places = [_place(frame.filename, frame) for frame in traceback.extract_tb(exception.traceback)]
    record["extra"]["origin"] = "\n".join([*places, type(exception.value).__name__])
    return "{message}\n{extra[origin]}"


def _hold_standard_streams() -> None:
    """If the program was started without one of them, keep its number from being given to a socket or a file.

    Libraries in C write to number 2 whatever it is.
    """
    for number in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # for the agent


def _write_json(message: "Message") -> None:
    record = message.record
    for text in _pieces(str(message).rstrip()):
        _write_line(json.dumps({"text": text, "record": _facts(record)}))


def _write_text(message: "Message") -> None:
    record = message.record
    head = f"{record['time']:YYYY-MM-DD HH:mm:ss.SSS} {_known_level(record['level'].no):<8} "
    for text in _pieces(str(message).rstrip()):
        _write_line(head + text)


def _facts(record: "Record") -> dict[str, object]:
    return {
        "level": {"name": _known_level(record["level"].no), "no": record["level"].no},
        "time": record["time"].isoformat(),
        "name": record["name"],
        "line": record["line"],
        "process": record["process"].id,
    }


def _known_level(number: int) -> str:
    """The level that the launcher knows and that is nearest; of two, the graver."""
    return min(reversed(LEVELS), key=lambda name: abs(LEVELS[name] - number))


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
