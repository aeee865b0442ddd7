"""The commands of the console script and their options. The help of each fits 24 lines of 80 columns."""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
from typing import Any

from statebackend._version import __version__
from statebackend.command_line import changes, listing, reading

_NO_NAME = "the name of a module and of an object in it, as in keys:cipher"


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80, max_help_position=26)


class _Parser(argparse.ArgumentParser):
    """The parser of all commands. Its own help has a line for each, so that all fit a terminal."""

    commands: Any

    def format_help(self) -> str:
        lines = [f"  {each.dest:10} {each.help}" for each in self.commands._choices_actions]
        end = "statebackend COMMAND --help shows the options of a command."
        return "\n".join([f"usage: {self.prog} COMMAND ...", "", *lines, "", end, ""])


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each puts its function into ``run``."""
    parser = _Parser(prog="statebackend")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.commands = parser.add_subparsers(
        metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser
    )
    _add_reading(commands)
    _add_changes(commands)
    _add_copies(commands)
    return parser


def _command(
    commands: Any, name: str, run: Any, text: str, *, changes_store: bool = False, program: bool = False
) -> Any:
    """A command that takes a store, perhaps after a program, with the options that all have."""
    made = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    made.set_defaults(run=run)
    if program:
        made.add_argument(
            "program", type=_program, metavar="MODULE:NAME", help="the function of the query, or its class"
        )
    made.add_argument("store", metavar="STORE", help="the state= of the query: a path or an address")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument(
        "--cipher", type=_imported, metavar="MODULE:NAME", help="the cipher of an encrypted store"
    )
    if changes_store:
        made.add_argument("--yes", action="store_true", help="do not ask")
        made.add_argument("--dry-run", action="store_true", help="print the effect, and change nothing")
        made.add_argument(
            "--single-writer", action="store_true", help="the query does not run, where the store cannot know"
        )
    return made


def _add_reading(commands: Any) -> None:
    made = _command(commands, "ls", listing.ls, "list the checkpoints, and how far back a rewind can go")
    made.add_argument(
        "--checkpoint-location", metavar="PATH", help="Spark's checkpointLocation; default: the recorded one"
    )
    _command(commands, "verify", listing.verify, "check every file of a store against its checksums")

    made = _command(commands, "states", reading.states, "list the states of a checkpoint")
    _add_id(made, "read")
    made = _command(commands, "read", reading.read, "print the entries of a state")
    made.add_argument("state", metavar="STATE", help="its name")
    _add_rows(made)
    _add_keys(made)
    made.add_argument("--columns", metavar="NAMES", help="only these columns, with commas between")
    made.add_argument("--expired", action="store_true", help="expired entries, too")
    made = _command(commands, "timers", reading.timers, "print the pending timers")
    _add_rows(made)
    _add_keys(made)
    made = _command(commands, "sql", reading.sql, "run SQL in which each state is a table")
    made.add_argument("query", metavar="QUERY", help="in the SQL of DuckDB")
    _add_rows(made)
    made = _command(commands, "changes", reading.changes, "print the changes of a state, with old values")
    made.add_argument("state", metavar="STATE", help="its name")
    made.add_argument("--since", type=int, metavar="BATCH", help="the checkpoint before; default: the oldest")
    made.add_argument("--until", type=int, metavar="BATCH", help="the last checkpoint; default: the newest")
    made.add_argument("--expired", action="store_true", help="show what has expired, too; scans the state")
    _add_limit(made)
    made = _command(commands, "diff", reading.diff, "compare two stores, savepoints or checkpoints")
    made.add_argument("other", metavar="OTHER", help="a store or savepoint; with --other-id perhaps the same")
    _add_id(made, "compare")
    made.add_argument("--other-id", type=int, metavar="BATCH", help="with this checkpoint of OTHER")
    made.add_argument("--state", metavar="STATE", help="compare only this state")
    _add_limit(made)
    made = _command(commands, "growth", reading.growth, "show the growth of each state, and its largest keys")
    made.add_argument("--top", type=int, default=10, metavar="N", help="keys to show; default: 10")
    made.add_argument(
        "--max-bytes", type=_size, metavar="SIZE", help="the limit of memory, such as 4g: a forecast"
    )
    made.add_argument("--expired", action="store_true", help="count what has expired; scans all checkpoints")


def _size(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _add_id(made: Any, verb: str) -> None:
    made.add_argument("--id", type=int, metavar="BATCH", help=f"{verb} this checkpoint; default: the newest")


def _add_rows(made: Any) -> None:
    _add_id(made, "read")
    _add_limit(made)


def _add_limit(made: Any) -> None:
    made.add_argument("--limit", type=int, metavar="N", help="rows to print; default: 50, with --json all")


def _add_keys(made: Any) -> None:
    made.add_argument(
        "--keys", type=reading.keys_of, metavar="JSON", help="only these keys, such as '[\"ann\"]'"
    )


def _add_changes(commands: Any) -> None:
    _command(commands, "repair", changes.repair, "go back to the newest whole checkpoint", changes_store=True)
    made = _command(
        commands, "rewind", changes.rewind, "take store, sinks and stream back", changes_store=True
    )
    made.add_argument(
        "--to", type=_batch, required=True, metavar="BATCH", help="the batch to keep; or start, for none"
    )
    _add_stream(made)
    made.add_argument("--keep-sinks", action="store_true", help="published data stays")
    made = _command(commands, "reset", changes.reset, "restart a store from empty state", changes_store=True)
    made.add_argument(
        "--first-batch", type=int, required=True, metavar="BATCH", help="the batch to begin with"
    )
    made = _command(commands, "set-time", changes.set_time, "set the times of a query", changes_store=True)
    text = "milliseconds since 1970, or as 2026-01-31T12:00:00Z"
    made.add_argument("--now", type=_time, metavar="TIME", help=f"the clock's: {text}")
    made.add_argument("--watermark", type=_time, metavar="TIME", help="that of event time")
    made = _command(commands, "drop", changes.drop, "drop a state", changes_store=True)
    made.add_argument("state", metavar="STATE", help="its name")
    made.add_argument("--target", metavar="PATH", help="leave the store, and make a copy without the state")
    _add_id(made, "copy")
    text = "show what a program does to each state"
    made = _command(commands, "plan", changes.plan, text, changes_store=True, program=True)
    made.add_argument("--approve", action="store_true", help="drop the states that it does not declare")


def _add_stream(made: Any) -> None:
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--checkpoint-location", metavar="PATH", help="Spark's checkpointLocation")
    where.add_argument("--store-only", action="store_true", help="leave the stream to you")


def _add_copies(commands: Any) -> None:
    made = _command(commands, "backup", changes.backup, "copy store and stream as of one batch")
    made.add_argument("target", metavar="TARGET", help="a new folder")
    _add_stream(made)
    _add_id(made, "copy")
    made = _command(commands, "restore", changes.restore, "put a backup back into new folders")
    made.add_argument("target", metavar="TARGET", help="the new store")
    _add_stream(made)
    made = _command(commands, "savepoint", changes.savepoint, "make a savepoint of a checkpoint")
    made.add_argument("target", metavar="TARGET", help="a new folder")
    _add_id(made, "copy")
    made = _command(commands, "rescale", changes.rescale, "copy a store to another number of key groups")
    made.add_argument("target", metavar="TARGET", help="the new store")
    made.add_argument("--max-parallelism", type=int, required=True, metavar="N", help="its key groups")
    _add_id(made, "copy")


# --- types of arguments ---


def _batch(text: str) -> int | None:
    return None if text == "start" else int(text)


_batch.__name__ = "batch"


def _time(text: str) -> int | datetime.datetime:
    try:
        return int(text)
    except ValueError:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))


_time.__name__ = "time"


def _imported(text: str) -> Any:
    """An object by the names of its module, which may be in this folder, and of itself."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected {_NO_NAME}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{error}; expected {_NO_NAME}") from error
    return found


def _program(text: str) -> Any:
    """A function with state, by the name of the function or of its class."""
    found = _imported(text)
    return found() if isinstance(found, type) else found
