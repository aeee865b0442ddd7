"""Draws ``build/bench/core.json`` as bars: ``python -m bench.core.plot docs/performance/core.svg``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.common.plot import bars


def main() -> None:
    rows = [row for row in json.loads(Path("build/bench/core.json").read_text())["rows"] if row["peer"]]
    names = list(dict.fromkeys(row["what"].split(",")[0] for row in rows))
    series = {"Flink": [next(r["peer"] for r in rows if r["what"].startswith(name)) for name in names]}
    for threads in sorted({row["what"].rsplit(",", 1)[1].strip() for row in rows}):
        series[f"statebackend, {threads}"] = [
            next(r["ours"] for r in rows if r["what"].startswith(name) and r["what"].endswith(threads))
            for name in names
        ]
    labels = [name.replace("_", " ") for name in names]
    bars(Path(sys.argv[1]), labels, series, "million rows a second", "%.0f")


if __name__ == "__main__":
    main()
