"""The documentation says what the code says."""

import re
from dataclasses import fields
from pathlib import Path

from tpu_tgi_server.config import Settings
from tpu_tgi_server.model import buckets

ROOT = Path(__file__).parent.parent


def rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_settings_page_lists_exactly_the_settings() -> None:
    documented = [row[0].strip("`") for row in rows((ROOT / "docs/settings.md").read_text())[2:]]
    assert documented == [field.name for field in fields(Settings)]


def test_architecture_page_lists_the_graphs_of_the_demo_model() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    listed = {row[0]: row[1] for row in rows(text) if row[0] in ("prefill tokens", "decode positions")}
    assert listed == {
        "prefill tokens": ", ".join(map(str, buckets.prefill_buckets(2047))),
        "decode positions": ", ".join(map(str, buckets.decode_buckets(2048))),
    }


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
