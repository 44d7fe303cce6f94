"""The profile of a server that answers a request."""

import json
from collections import Counter
from pathlib import Path

import pytest
from loguru import logger

from tests.driver import Driver, new_request
from tests.servers import ready_server, start_model_server
from tpu_tgi_server.profiling import span, start_profile


def test_profile_has_the_stages_of_each_call_in_both_processes(tmp_path: Path, tiny_model_folder: Path) -> None:
    profile = tmp_path / "profile.json"
    options = ["--device", "cpu", "--max-total-tokens", "64", "--profile", str(profile)]
    with ready_server(start_model_server(tmp_path, tiny_model_folder, *options)) as server, server.connect() as stub:
        Driver(stub).run(1, new_request(1, "a", new=4))
    events = json.loads(profile.read_text().rstrip().rstrip(",") + "]")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["agent", "root"]
    counts = Counter((names[event["pid"]], event["name"], event["ph"]) for event in events)
    for stage in ("Prefill", "mailbox Prefill"):
        assert counts["root", stage, "b"] == counts["root", stage, "e"] == 1
    for stage in ("Decode", "mailbox Decode"):
        assert counts["root", stage, "b"] == counts["root", stage, "e"] == 3
    for stage, count in {"admit": 1, "prefill": 1, "start steps": 3, "wait for tokens": 3, "text": 3}.items():
        assert counts["agent", stage, "X"] == count
    decodes = [event for event in events if event["name"] == "Decode" and event["ph"] == "X"]
    texts = [event for event in events if event["name"] == "text"]
    for decode, text in zip(decodes, texts, strict=True):
        assert decode["ts"] <= text["ts"]
        assert text["ts"] + text["dur"] <= decode["ts"] + decode["dur"]


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/removed"], ids=["full disk", "removed file"])
def test_profile_that_cannot_be_written_ends_with_one_warning_and_the_work_goes_on(path: str) -> None:
    warnings: list[str] = []
    sink = logger.add(warnings.append, level="WARNING", format="{message}")
    try:
        start_profile(Path(path), "agent")
        with span("Decode"), span("text"):
            pass
    finally:
        logger.remove(sink)
        start_profile(None, "agent")
    (warning,) = warnings
    assert warning.startswith("--profile ends here: ")
