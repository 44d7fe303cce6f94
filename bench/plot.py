"""The bars as a picture."""

from collections.abc import Sequence
from pathlib import Path

from bench.bars import Bar
from bench.kinds import StepCost

COLOURS = {True: "#2e7d32", False: "#c62828", None: "#9e9e9e"}


def draw(bars: Sequence[Bar], costs: Sequence[StepCost], path: Path) -> None:
    """Left, how far each figure is from its bar (1 is the bar); right, where a step's time goes for each kind."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(16, 6), width_ratios=(3, 2), layout="constrained")
    shown = [bar for bar in reversed(bars) if bar.value is not None and bar.limit]
    left.barh([bar.what for bar in shown], [(bar.value or 0) / bar.limit for bar in shown])
    for patch, bar in zip(left.patches, shown, strict=True):
        patch.set_facecolor(COLOURS[bar.is_met])
        left.annotate(f" {bar.value:.3g} ({bar.relation} {bar.limit:g})", (patch.get_width(), patch.get_y() + 0.25))
    left.axvline(1, color="black", linewidth=1)
    left.margins(x=0.35)
    left.set_xlabel("figure ÷ bar")
    bottom = [0.0] * len(costs)
    kinds = [cost.kind for cost in costs]
    for label, values in (
        ("model and sampler", [cost.forward_ms for cost in costs]),
        ("text, grammar", [cost.text_ms for cost in costs]),
        ("gRPC, mailbox", [max(cost.host_ms - cost.text_ms, 0) for cost in costs]),
    ):
        right.bar(kinds, values, bottom=bottom, label=label)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    right.tick_params(axis="x", rotation=30)
    right.set_ylabel("ms for a decode step of 8 streams")
    right.legend()
    figure.savefig(path, dpi=120)
