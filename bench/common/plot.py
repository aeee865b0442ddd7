"""Bars side by side, and curves, as SVG that changes only with its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def bars(
    out: Path, names: Sequence[str], series: Mapping[str, Sequence[float | None]], ylabel: str, form: str
) -> None:
    """Draw one bar of each series above each name; None leaves it out. ``form`` is the format of the labels."""
    pyplot = _pyplot(out)
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    width = 0.81 / len(series)
    for at, (label, values) in enumerate(series.items()):
        there = [(x, value) for x, value in enumerate(values) if value is not None]
        places = [x + (at - (len(series) - 1) / 2) * width for x, _ in there]
        drawn = axes.bar(places, [value for _, value in there], width * 0.93, label=label)
        axes.bar_label(drawn, fmt=form, fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_ylabel(ylabel)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(pyplot, figure, out)


def curves(
    out: Path,
    xs: Sequence[float],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    xlabel: str,
    ylabel: str,
) -> None:
    """Draw a panel for each name, with a line for each of its series over ``xs``, both axes by powers of ten."""
    pyplot = _pyplot(out)
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(8, 3.6), sharey=True, squeeze=False)
    for axes, (name, series) in zip(all_axes[0], panels.items(), strict=True):
        for label, values in series.items():
            there = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
            axes.plot(
                [x for x, _ in there], [value for _, value in there], marker="o", markersize=3, label=label
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(xlabel, fontsize=8)
        axes.grid(True, which="major", linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].set_ylabel(ylabel)
    all_axes[0][0].legend(fontsize=7, frameon=False)
    _save(pyplot, figure, out)


def _pyplot(out: Path) -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = out.stem
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, out: Path) -> None:
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)
