"""The commands that read state and compare it."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from statebackend import tools
from statebackend.checkpoint import Checkpoint, CheckpointReader
from statebackend.command_line.console import DIFFERENT, DONE, Console
from statebackend.command_line.layout import size_text, span_text, time_text
from statebackend.command_line.listing import reader

#: Rows that a table for people shows.
_MOST_SHOWN = 50


def _stored(options: argparse.Namespace) -> CheckpointReader | str:
    """The store or savepoint that a command reads."""
    return str(options.store) if options.cipher is None else reader(options)


def _moment(path: str, id: int | None, cipher: Any) -> Checkpoint | CheckpointReader | str:
    """One side of a comparison: a checkpoint of a store, or the newest; or a savepoint."""
    if id is None and cipher is None:
        return path
    store = CheckpointReader(path, encryption=cipher)
    return store if id is None else store.open(id)


def states(options: argparse.Namespace, console: Console) -> int:
    found = tools.states(_stored(options), id=options.id).to_table().to_pylist()
    if not console.is_json:
        shown = {"bytes": size_text, "ttl": span_text}
        found = [
            {name: shown[name](value) if name in shown else value for name, value in row.items()}
            for row in found
        ]
    console.show_rows(found)
    return DONE


def read(options: argparse.Namespace, console: Console) -> int:
    columns = None if options.columns is None else options.columns.split(",")
    given = {"id": options.id, "keys": options.keys, "columns": columns, "expired": options.expired}
    rows = tools.state(_stored(options), options.state, **given)
    return _show(rows.to_batches(), options, console)


def timers(options: argparse.Namespace, console: Console) -> int:
    rows = tools.timers(_stored(options), id=options.id, keys=options.keys)
    return _show(rows.to_batches(), options, console)


def sql(options: argparse.Namespace, console: Console) -> int:
    table = tools.sql(_stored(options), options.query, id=options.id)
    return _show(table.to_batches(), options, console)


def changes(options: argparse.Namespace, console: Console) -> int:
    given = {"since": options.since, "until": options.until, "expired": options.expired}
    store = reader(options)
    store.open_latest()  # raises the error for a store that is not there
    rows = tools.changes(store, options.state, **given)
    return _show(rows.to_batches(), options, console)


def diff(options: argparse.Namespace, console: Console) -> int:
    before = _moment(options.store, options.id, options.cipher)
    after = _moment(options.other, options.other_id, options.cipher)
    found = tools.diff(before, after, name=options.state)
    if console.is_json:
        console.show({name: rows.to_table().to_pylist() for name, rows in found.items()})
    for name, rows in () if console.is_json else found.items():
        print(f"{name}:")
        _show(rows.to_batches(), options, console)
    if not found and not console.is_json:
        print("no difference")
    return DIFFERENT if found else DONE


def growth(options: argparse.Namespace, console: Console) -> int:
    limits = {"top": options.top, "max_bytes": options.max_bytes, "expired": options.expired}
    found = tools.growth(reader(options), **limits)
    rows = {name: getattr(found, name).to_table().to_pylist() for name in ("batches", "largest", "longest")}
    if console.is_json:
        names = ("untouched", "expired_at", "memory_bytes", "memory_per_batch", "batches_left")
        forecast = {name: getattr(found, name) for name in names}
        console.show({**rows, **forecast})
        return DONE
    states: dict[str, list[dict[str, Any]]] = {}
    for row in rows["batches"]:
        states.setdefault(row["state"], []).append(row)
    summary = [
        {
            "state": name,
            "batches": f"{own[0]['batch_id']} to {own[-1]['batch_id']}",
            "entries": f"{_or_unknown(own[0]['entries'])} to {_or_unknown(own[-1]['entries'])}",
            "rows a batch": _mean_growth(own),
            "file bytes": size_text(own[-1]["bytes"]),
            "untouched": f"{found.untouched[name]:.0%}" if name in found.untouched else "",
            "expired at (UTC)": time_text(found.expired_at.get(name)),
        }
        for name, own in states.items()
    ]
    shown = {"states": summary, "most bytes": rows["largest"], "most entries": rows["longest"]}
    memory = {
        "memory": size_text(found.memory_bytes) or "?",
        "memory a batch": size_text(found.memory_per_batch) or "?",
    }
    left = {} if options.max_bytes is None else {"batches left": _or_unknown(found.batches_left)}
    console.show({**memory, **left, **shown})
    return DONE


def _mean_growth(rows: list[dict[str, Any]]) -> str:
    """The rows of a state that a batch has added on average, less those that it has removed."""
    known = [row["inserted"] - row["removed"] for row in rows if row["inserted"] is not None]
    return f"{sum(known) / len(known):+.1f}" if known else ""


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)


def _show(batches: Iterable[pa.RecordBatch], options: argparse.Namespace, console: Console) -> int:
    """Print rows: as JSON all of them, for people the first ones; ``--limit`` sets how many."""
    limit = options.limit
    rows = _rows(batches)
    if console.is_json:
        console.show_rows(itertools.islice(rows, limit))
        return DONE
    limit = _MOST_SHOWN if limit is None else limit
    found = list(itertools.islice(rows, limit + 1))
    console.show_rows(found[:limit])
    if len(found) > limit:
        console.note(f"there are more than {limit} rows; --limit sets how many are shown")
    return DONE


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


def keys_of(text: str) -> list[Any]:
    """Keys in JSON: a list of them, or one key. A key of several fields is a list or an object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'expected JSON, such as \'["ann", "bob"]\': {error}') from error
    return found if isinstance(found, list) else [found]
