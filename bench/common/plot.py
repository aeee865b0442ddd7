"""Bars side by side, as SVG that changes only with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def bars(
    out: Path, names: Sequence[str], series: Mapping[str, Sequence[float | None]], ylabel: str, form: str
) -> None:
    """Draw one bar of each series above each name; None leaves it out. ``form`` is the format of the labels."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = out.stem
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    width = 0.81 / len(series)
    for at, (label, values) in enumerate(series.items()):
        there = [(x, value) for x, value in enumerate(values) if value is not None]
        places = [x + (at - (len(series) - 1) / 2) * width for x, _ in there]
        drawn = axes.bar(places, [value for _, value in there], width * 0.93, label=label)
        axes.bar_label(drawn, fmt=form, fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)
