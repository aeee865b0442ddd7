"""The commands that change a store, after they have printed the effect and asked, and those that make a copy."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from statebackend import tools
from statebackend.checkpoint import CheckpointStore
from statebackend.command_line.console import DONE, FAILED, Console
from statebackend.command_line.listing import reader


def _writable(options: argparse.Namespace) -> CheckpointStore:
    return CheckpointStore(options.store, encryption=options.cipher, single_writer=options.single_writer)


def _change(options: argparse.Namespace, console: Console, tool: Any, *arguments: Any, **named: Any) -> int:
    run = partial(tool, _writable(options), *arguments, **named)
    return console.change(run, only_look=options.dry_run)


def repair(options: argparse.Namespace, console: Console) -> int:
    looked = tools.repair(_writable(options), dry_run=True)
    options.dry_run |= not looked.removed  # there is nothing to ask
    return _change(options, console, tools.repair)


def rewind(options: argparse.Namespace, console: Console) -> int:
    where = {"to": options.to, "checkpoint_location": options.checkpoint_location}
    return _change(options, console, tools.rewind, **where, sink=None if options.keep_sinks else "recorded")


def reset(options: argparse.Namespace, console: Console) -> int:
    return _change(options, console, tools.reset, first_batch=options.first_batch)


def set_time(options: argparse.Namespace, console: Console) -> int:
    return _change(options, console, tools.set_time, now=options.now, watermark=options.watermark)


def drop(options: argparse.Namespace, console: Console) -> int:
    if options.target is None:
        return _change(options, console, tools.drop_state, options.state, id=options.id)
    given = {"target": options.target, "id": options.id, "dry_run": options.dry_run}
    console.show(tools.drop_state(reader(options), options.state, **given))
    return DONE


def plan(options: argparse.Namespace, console: Console) -> int:
    planned = tools.plan(_writable(options) if options.approve else reader(options), options.program)
    if options.approve:
        return console.change(
            lambda dry_run: planned if dry_run else planned.approve(), only_look=options.dry_run
        )
    console.show(planned)
    return DONE if planned.is_safe else FAILED


def backup(options: argparse.Namespace, console: Console) -> int:
    given = {"checkpoint_location": options.checkpoint_location, "id": options.id}
    console.show(tools.backup(reader(options), options.target, **given))
    return DONE


def restore(options: argparse.Namespace, console: Console) -> int:
    where = options.checkpoint_location
    console.show(tools.restore(reader(options), options.target, checkpoint_location=where))
    return DONE


def savepoint(options: argparse.Namespace, console: Console) -> int:
    made = tools.savepoint(reader(options), options.target, id=options.id)
    console.show({"savepoint": made.uri})
    return DONE


def rescale(options: argparse.Namespace, console: Console) -> int:
    given = {"max_parallelism": options.max_parallelism, "id": options.id}
    copy = tools.rescale(reader(options), options.target, **given)
    console.show({"store": options.target, "checkpoint": copy.id, "max_parallelism": options.max_parallelism})
    return DONE
