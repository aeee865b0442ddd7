"""Draws ``build/bench/core.json`` as bars: ``python -m bench.core.plot docs/performance/core.svg``."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "core"
    from matplotlib import pyplot

    rows = [row for row in json.loads(Path("build/bench/core.json").read_text())["rows"] if row["peer"]]
    names = list(dict.fromkeys(row["what"].split(",")[0] for row in rows))
    series = {"Flink": [next(r["peer"] for r in rows if r["what"].startswith(name)) for name in names]}
    for threads in sorted({row["what"].rsplit(",", 1)[1].strip() for row in rows}):
        series[f"statebackend, {threads}"] = [
            next(r["ours"] for r in rows if r["what"].startswith(name) and r["what"].endswith(threads))
            for name in names
        ]
    figure, axes = pyplot.subplots(figsize=(8, 3.6))
    for at, (label, values) in enumerate(series.items()):
        bars = axes.bar([x + (at - 1) * 0.27 for x in range(len(names))], values, 0.25, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(names)), [name.replace("_", " ") for name in names], fontsize=8)
    axes.set_ylabel("million rows a second")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(sys.argv[1], metadata={"Date": None})


if __name__ == "__main__":
    main()
