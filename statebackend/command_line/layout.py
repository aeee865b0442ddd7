"""Lays out results for people: records, tables, times and sizes."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MOST_SHOWN = 10
_SPANS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"))


def size_text(size: float | None) -> str:
    """A number of bytes.

    >>> [size_text(each) for each in (None, 0, 999, 1234, 56_789_000_000)]
    ['', '0 B', '999 B', '1.2 kB', '56.8 GB']
    """
    if size is None:
        return ""
    unit = 0
    while abs(size) >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size:.0f} B"


def time_text(time: int | None) -> str:
    """A moment in milliseconds since 1970, in UTC.

    >>> time_text(1_700_000_000_000), time_text(None)
    ('2023-11-14 22:13:20', '')
    """
    if time is None:
        return ""
    moment = datetime.datetime(1970, 1, 1) + datetime.timedelta(milliseconds=time)  # noqa: DTZ001 - shown without
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def span_text(span: int | None) -> str:
    """A duration in milliseconds, in its two largest units.

    >>> [span_text(each) for each in (None, 250, 61_000, 7_500_000, 90_000_000)]
    ['', '0.25 s', '1 min 1 s', '2 h 5 min', '1 d 1 h']
    """
    if span is None:
        return ""
    for at, (length, unit) in enumerate(_SPANS):
        if span >= length:
            smaller, name = _SPANS[at + 1] if at + 1 < len(_SPANS) else (1000, "s")
            return f"{span // length} {unit} {span % length // smaller} {name}"
    return f"{span / 1000:g} s"


def table(rows: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """A table with aligned columns; numbers are at the right. The widest columns are cut to ``width``.

    >>> print(table([{"id": 7, "name": "totals"}, {"id": 12, "name": None}]))
    id  name
     7  totals
    12
    >>> print(table([{"id": 7, "name": "a long name"}], 10))
    id  name
     7  a lon…
    """
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[at]) for line in cells)) for at, name in enumerate(names)]
    while width is not None and sum(widths) + 2 * len(widths) - 2 > width and max(widths) > 4:
        widths[widths.index(max(widths))] -= 1
    numeric = [all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names]
    lines = []
    for line in (names, *cells):
        cut = [
            text if len(text) <= room else f"{text[: room - 1]}…"
            for text, room in zip(line, widths, strict=True)
        ]
        aligned = [
            text.rjust(room) if right else text.ljust(room)
            for text, room, right in zip(cut, widths, numeric, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return " ".join(str(value).split())


def record(result: Any, width: int | None = None) -> str:
    """A result of a tool: its fields line by line, and each list of records as a table below them.

    >>> from statebackend.tools import Problem, Repaired
    >>> print(record(Repaired(6, ["checkpoints/3.json"])))
    to       6
    removed  checkpoints/3.json
    """
    fields = fields_of(result)
    tables = {name: each for name, each in fields.items() if _is_records(each)}
    plain = {name: each for name, each in fields.items() if name not in tables}
    room = max(map(len, plain), default=0)
    lines = []
    for name, value in plain.items():
        first, *others = _lines(value)
        lines += [f"{name:{room}}  {first}".rstrip(), *(f"{'':{room}}  {each}" for each in others)]
    for name, rows in tables.items():
        lines += ["", f"{name}:", table([fields_of(row) for row in rows], width)]
    return "\n".join(lines)


def _lines(value: Any) -> list[str]:
    """A field: numbers in one line, texts in a line each, of which the first ten are shown."""
    if not isinstance(value, (list, tuple)) or (value and all(isinstance(each, int) for each in value)):
        return [_cell(value)]
    shown = [_cell(each) for each in value[:_MOST_SHOWN]]
    left = len(value) - len(shown)
    return [*shown, f"and {left} more"] if left else shown or ["none"]


def fields_of(result: Any) -> dict[str, Any]:
    """The fields of a record; a mapping's are its members."""
    if isinstance(result, Mapping):
        return dict(result)
    names = [each.name for each in dataclasses.fields(result) if not each.name.startswith("_")]
    return {name: getattr(result, name) for name in names}


def _is_records(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(dataclasses.is_dataclass(each) or isinstance(each, Mapping) for each in value)
    )
