"""Rows of figures: printed at once, written as JSON at the end, with what they were measured on."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np


class Report:
    """Rows of figures, and whether each reaches its target."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def row(
        self,
        figure: str,
        what: str,
        ours: float,
        unit: str,
        peer: float | None = None,
        bigger_is_better: bool = True,
        *,
        peer_name: str = "Flink",
        target: float | None = None,
        at_most: bool = False,
        **details: Any,
    ) -> None:
        """Add a row and print it.

        ``target`` is what the ratio of ours to the peer's has to be at least (with ``at_most``: at most);
        ``details`` are kept in the JSON only.
        """
        ratio = None if not peer else (ours / peer if bigger_is_better else peer / ours)
        met = None if ratio is None or target is None else (ratio <= target if at_most else ratio >= target)
        row = {"figure": figure, "what": what, "ours": ours, "unit": unit, "peer": peer, "ratio": ratio}
        row |= {"peer_name": peer_name, "target": target, "at_most": at_most, "met": met, **details}
        self.rows.append(row)
        text = f"{figure:11} {what:56} {ours:10.3f} {unit:10}"
        if ratio is not None:
            text += f" {peer_name} {peer:10.3f}   {ratio:6.2f} x"
        if met is not None:
            text += f"   {'at most' if at_most else 'at least'} {target:.2f} x: {'met' if met else 'NOT MET'}"
        print(text, flush=True)

    def write(self, out: Path, args: argparse.Namespace, **more: Any) -> None:
        """Write the rows, the arguments and the machine as JSON."""
        out.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine(), "arguments": vars(args), **more, "rows": self.rows}
        out.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {out}")


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_average": os.getloadavg()[0],
    }


def processor() -> str:
    """The name of the processor where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
