"""Log records: their shape, their size, and that records of several processes never mix."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ROOT
from tpu_tgi_server.logs import MAX_RECORD_BYTES

SETUP = "import logging; from loguru import logger; from tpu_tgi_server.logs import configure_logging as configure\n"


def start(code: str, stdout: Any = subprocess.PIPE) -> "subprocess.Popen[str]":
    """Run code in a process of its own: logging set-up is global to a process."""
    command = [sys.executable, "-c", SETUP + code]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "1"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment)


def output_of(code: str) -> str:
    process = start(code)
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    return output


def records_of(code: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output_of(code).splitlines()]


def test_json_record_has_what_the_launcher_reads() -> None:
    (record,) = records_of("configure('INFO', True); logger.warning('a \"quoted\" {}', 'ünïcödé')")
    assert record["text"] == 'a "quoted" ünïcödé'
    assert record["record"]["level"] == {"name": "WARNING", "no": 30}


def test_text_record_is_a_line_with_time_and_level() -> None:
    (line,) = output_of("configure('INFO', False); logger.info('hello {}', 'there')").splitlines()
    assert line[4] == line[7] == "-"
    assert line.endswith(" INFO     hello there")


@pytest.mark.parametrize(
    ("level", "texts"),
    [
        ("DEBUG", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("WARN", ["warning", "error"]),
        ("ERROR", ["error"]),
        ("OFF", []),
    ],
)
def test_level_is_the_least_that_is_shown(level: str, texts: list[str]) -> None:
    calls = "; ".join(f"logger.{text}('{text}')" for text in ("debug", "info", "warning", "error"))
    assert [record["text"] for record in records_of(f"configure('{level}', True); {calls}")] == texts


def test_unknown_level_is_refused() -> None:
    code = "try: configure('LOUD', True)\nexcept ValueError as error: print(error)"
    assert "LOUD" in output_of(code)


def test_standard_logging_is_passed_on() -> None:
    code = "configure('INFO', True); logging.getLogger('library').warning('%d things', 3)"
    (record,) = records_of(code)
    assert (record["text"], record["record"]["level"]["name"]) == ("3 things", "WARNING")


@pytest.mark.parametrize(
    ("level", "shown"),
    [(6, "TRACE"), (15, "INFO"), (22, "INFO"), (25, "SUCCESS"), (35, "ERROR"), (60, "CRITICAL")],
)
def test_level_that_the_launcher_does_not_know_is_the_nearest_that_it_does(level: int, shown: str) -> None:
    for call in (f"logger.log({level}, 'x')", f"logger.level('OWN', no={level}); logger.log('OWN', 'x')"):
        (record,) = records_of(f"configure('TRACE', True); {call}")
        assert record["record"]["level"] == {"name": shown, "no": level}


def test_own_levels_of_the_standard_logging_are_passed_on() -> None:
    (record,) = records_of("configure('INFO', True); logging.getLogger('library').log(35, 'x')")
    assert record["record"]["level"] == {"name": "ERROR", "no": 35}


FAILURE = """
def fail(prompt):
    raise KeyError(prompt)

def call():
    try: fail('my ' + 'prompt')
    except KeyError: {log}
call()
"""


@pytest.mark.parametrize("log", ["logger.exception('it {failed}')", "logging.exception('it {failed}')"])
def test_exception_is_one_record_with_its_origin_and_not_its_text(log: str) -> None:
    (record,) = records_of("configure('INFO', True)\n" + FAILURE.replace("{log}", log))
    assert record["text"].splitlines() == ["it {failed}", "<string>:8 call", "<string>:5 fail", "KeyError"]


def test_text_of_an_exception_is_in_records_below_info() -> None:
    log = "logger.opt(exception=True).debug('it failed')"
    (record,) = records_of("configure('DEBUG', True)\n" + FAILURE.replace("{log}", log))
    assert record["text"].startswith("it failed\nTraceback")
    assert record["text"].endswith("KeyError: 'my prompt'")


@pytest.mark.parametrize("character", ["x", "é", "🙂", '"', "\\x00"])
@pytest.mark.parametrize("is_json", [True, False])
def test_long_text_goes_on_in_records_of_atomic_size(character: str, is_json: bool) -> None:
    output = output_of(f"configure('INFO', {is_json}); logger.info('{{}}', '{character}' * 5000)")
    lines = output.encode().splitlines(keepends=True)
    assert len(lines) > 1
    assert max(map(len, lines)) <= MAX_RECORD_BYTES
    text = "".join(json.loads(line)["text"] for line in lines) if is_json else output
    assert text.count(character.replace("\\x00", "\x00")) == 5000


def test_records_of_several_processes_do_not_mix_on_one_pipe(tmp_path: Path) -> None:
    code = "configure('INFO', True)\nfor n in range(2000): logger.info('{} {}', n, 'é' * 250)"
    output = tmp_path / "output"
    with output.open("wb") as file:
        reader = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=file)
        writers = [start(code, stdout=reader.stdin) for _ in range(3)]
        errors = [writer.communicate()[1] for writer in writers]
        reader.communicate()
    assert errors == ["", "", ""]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    for writer in writers:
        texts = [record["text"] for record in records if record["record"]["process"] == writer.pid]
        assert texts == [f"{number} {'é' * 250}" for number in range(2000)]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_program_without_standard_streams_does_not_write_into_its_files(tmp_path: Path, closed: str) -> None:
    code = f"configure('INFO', True)\nimport os\nfile = open({str(tmp_path / 'file')!r}, 'w')\nlogger.info('x')\n"
    code += "os.write(2, b'y')\nopen(file.name + '-number', 'w').write(str(file.fileno()))"
    command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, SETUP + code]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")}, check=False)
    assert done.returncode == 0
    assert (done.stdout == "") == (">&-" in closed.split())
    assert (done.stderr == "") == ("2>&-" in closed)
    assert (tmp_path / "file").read_text() == ""
    assert int((tmp_path / "file-number").read_text()) > 2
