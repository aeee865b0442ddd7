"""The output, the questions and the exit status of a command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from statebackend.command_line.layout import fields_of, record, table
from statebackend.errors import StateBackendError

DONE, FAILED, WRONG_USAGE, DIFFERENT = 0, 1, 2, 3

#: The words of a hint for a program, and the same for a shell.
_FOR_A_SHELL = {
    "pass checkpoint_location=None": "use --store-only",
    "checkpoint_location=None": "--store-only",
    "pass the sinks with sink=, or sink=None,": "use --keep-sinks",
    "pass sb.CheckpointStore(..., single_writer=True)": "use --single-writer",
    "sb.tools.repair(store)": "statebackend repair STORE",
    "target=": "--target",
    "id=": "--id",
}


class Console:
    """The output of one command, for people or as JSON, and its questions."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.is_json: bool = options.json
        self._is_sure: bool = getattr(options, "yes", False)
        self.width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None

    def show(self, result: Any, shown: str | None = None) -> None:
        """Print a result, for people as ``shown`` if that is given."""
        if self.is_json:
            print(json.dumps(result, default=_as_json, ensure_ascii=False))
        else:
            print(record(result, self.width) if shown is None else shown)

    def show_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Print rows: a table, or in JSON a list, row by row."""
        if self.is_json:
            separator = "["
            for row in rows:
                print(separator, json.dumps(row, default=_as_json, ensure_ascii=False), sep="", end="")
                separator = ",\n"
            print("[]" if separator == "[" else "]")
            return
        found = list(rows)
        print(table(found, self.width) if found else "no rows")

    def note(self, text: str) -> None:
        """Print a remark that is not a part of the result."""
        print(text, file=sys.stderr)

    def refuse(self, error: StateBackendError) -> int:
        """Print an error, in JSON too."""
        hint = error.hint or ""
        for said, meant in _FOR_A_SHELL.items():
            hint = hint.replace(said, meant)
        if self.is_json:
            found = {
                "code": error.code,
                "message": error.message,
                "detail": error.detail,
                "hint": hint or None,
            }
            print(json.dumps({"error": found}, ensure_ascii=False))
        detail = f" ({error.detail})" if error.detail else ""
        print(f"error: {error.message}{detail} [{error.code}]", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
        return FAILED

    def change(self, run: Callable[..., Any], *, only_look: bool) -> int:
        """Print the effect of a change, which ``run`` returns with ``dry_run=True``; ask, and make the change."""
        effect = run(dry_run=True)
        if only_look:
            self.show(effect)
            return DONE
        shown = record(effect, self.width)
        print(shown, file=sys.stderr if self.is_json else sys.stdout, flush=True)
        if not self._is_sure:
            if not sys.stdin.isatty():
                print("error: cannot ask without a terminal; expected --yes or --dry-run", file=sys.stderr)
                return WRONG_USAGE
            print("Change the store? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                print("nothing was changed", file=sys.stderr)
                return FAILED
        result = run(dry_run=False)
        same = record(result, self.width) == shown
        self.show(result, "done" if same else None)
        return DONE


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        members = fields_of(value)
        return {**members, "ok": value.ok} if hasattr(value, "ok") else members
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    return str(value)
