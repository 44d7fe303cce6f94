"""What was measured, and the bar that it should meet."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """One figure beside its limit.

    Attributes:
        what: the figure, in words.
        value: what was measured; None if it could not be measured here, with the reason in `note`.
        limit: what it should be.
        relation: how `value` should stand to `limit`: `>=`, `<=` or `=`.
        unit: of both; empty for ratios and counts.
        note: the parts that the figure was made of.
    """

    what: str
    value: float | None
    limit: float
    relation: str
    unit: str = ""
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None where nothing was measured."""
        if self.value is None:
            return None
        return {">=": self.value >= self.limit, "<=": self.value <= self.limit, "=": self.value == self.limit}[
            self.relation
        ]

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.is_met]


def bars_table(bars: Sequence[Bar]) -> str:
    """One line for each bar."""
    width = max(len(bar.what) for bar in bars)
    lines = []
    for bar in bars:
        value = "-" if bar.value is None else f"{bar.value:.4g}"
        limit = f"{bar.relation} {bar.limit:g} {bar.unit}".rstrip()
        lines.append(f"{bar.what:{width}}  {value:>8}  {limit:10}  {bar.verdict:12}  {bar.note}".rstrip())
    return "\n".join(lines)


def bar_as_json(bar: Bar) -> dict[str, Any]:
    """The bar with its verdict."""
    return {**asdict(bar), "is_met": bar.is_met}
