"""The documentation says what the code says."""

import re
from dataclasses import fields
from pathlib import Path

from tests.launcher import SERVE_ALWAYS, SERVE_OPTIONAL, SERVE_REFUSED
from tpu_tgi_server.config import VARIABLES, Settings
from tpu_tgi_server.model import buckets

ROOT = Path(__file__).parent.parent


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_settings_page_lists_exactly_the_settings() -> None:
    documented = [row[0].strip("`") for row in rows((ROOT / "docs/settings.md").read_text())[2:]]
    assert documented == [field.name for field in fields(Settings)]


def test_settings_page_names_the_variables_of_every_setting() -> None:
    documented = {row[0].strip("`"): row[1] for row in rows((ROOT / "docs/settings.md").read_text())[2:]}
    for name, variable in VARIABLES.items():
        assert all(f"`{other}`" in documented[name] for other in variable.names), name


def test_operating_page_has_every_option_of_the_launcher() -> None:
    text = (ROOT / "docs/operating.md").read_text()
    options = [SERVE_ALWAYS, *SERVE_OPTIONAL, *SERVE_REFUSED]
    flags = {word for option in options for word in option if word.startswith("--")}
    absent = {flag for flag in flags if flag not in text}
    assert absent == {"--logger-level"}  # the launcher has LOG_LEVEL for it


def test_architecture_page_lists_the_graphs_of_the_demo_model() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    kinds = ("prefill tokens", "chunk positions", "decode positions")
    listed = {row[0]: row[1] for row in rows(text) if row[0] in kinds}
    chunk_tokens = Settings.prefill_chunk_tokens
    assert listed == {
        "prefill tokens": ", ".join(map(str, buckets.prefill_buckets(chunk_tokens))),
        "chunk positions": ", ".join(map(str, buckets.chunk_buckets(chunk_tokens, 2047, 2048))),
        "decode positions": ", ".join(map(str, buckets.decode_buckets(2048))),
    }


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
