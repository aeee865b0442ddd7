"""Redistribution: deals the operator state of the old instances out to the new ones.

The contents of one instance are plain data: a dict by state name. Each value is a dict with ``mode``, ``config`` (of
the types) and either ``elements``, a list of serialised elements, or ``entries``, a list of pairs of serialised key
and value (None for None).

>>> def split(*elements):
...     return {"s": {"mode": "split", "config": {}, "elements": list(elements)}}
>>> new = redistribute([split(b"a", b"b"), split(b"c")], 3)
>>> [contents["s"]["elements"] for contents in new]
[[b'a'], [b'b'], [b'c']]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from statebackend.errors import StateMigrationError, UsageError

#: The states of one instance, by name.
OperatorContents: TypeAlias = "dict[str, dict[str, Any]]"

SPLIT, UNION, BROADCAST = "split", "union", "broadcast"


def redistribute(snapshots: Sequence[Mapping[str, Any]], new_parallelism: int) -> list[OperatorContents]:
    """The contents of ``new_parallelism`` instances, from those of the old ones, in order. O(elements).

    *Split* states stay as they are if the number of instances does. Otherwise the elements of all old instances are
    concatenated and cut into even runs. The runs that are longer by one go to consecutive instances; for each state, in
    sorted order of names, these begin after the last instance that got one. *Union*: every instance gets all elements.
    *Broadcast*: a new instance gets the copy of the old instance with its number; if there are fewer, they take turns.

    >>> union = {"u": {"mode": "union", "config": {}, "elements": [b"x"]}}
    >>> [contents["u"]["elements"] for contents in redistribute([union, union], 1)]
    [[b'x', b'x']]
    """
    if type(new_parallelism) is not int or new_parallelism < 1:
        raise UsageError("the new parallelism is a positive int")
    new: list[OperatorContents] = [{} for _ in range(new_parallelism)]
    same = len(snapshots) == new_parallelism
    start = 0
    for name in sorted({name for snapshot in snapshots for name in snapshot}):
        mode = _mode_of(name, snapshots)
        reported = [snapshot[name] for snapshot in snapshots if name in snapshot]
        if mode == BROADCAST:
            unchanged = same and len(reported) == len(snapshots)
            for i, contents in enumerate(new):
                contents[name] = dict(snapshots[i][name] if unchanged else reported[i % len(reported)])
            continue
        if mode == SPLIT and same:
            for contents, snapshot in zip(new, snapshots, strict=True):
                if name in snapshot:
                    contents[name] = dict(snapshot[name])
            continue
        elements = [element for state in reported for element in state["elements"]]
        if mode == UNION:
            shares = [elements] * new_parallelism
        else:
            shares, start = _even_runs(elements, new_parallelism, start)
        for contents, share in zip(new, shares, strict=True):
            contents[name] = {**reported[0], "elements": list(share)}
    return new


def _even_runs(elements: list[Any], n: int, start: int) -> tuple[list[list[Any]], int]:
    """The run of each instance, and the instance at which the next state begins."""
    base, longer = divmod(len(elements), n)
    shares: list[list[Any]] = [[] for _ in range(n)]
    at = 0
    for turn in range(n):
        size = base + (turn < longer)
        shares[(start + turn) % n] = elements[at : at + size]
        at += size
    return shares, (start + longer) % n


def _mode_of(name: str, snapshots: Sequence[Mapping[str, Any]]) -> str:
    modes = {snapshot[name]["mode"] for snapshot in snapshots if name in snapshot}
    configs = [snapshot[name]["config"] for snapshot in snapshots if name in snapshot]
    if len(modes) > 1 or any(config != configs[0] for config in configs):
        raise StateMigrationError(
            f"the instances disagree about the operator state {name!r}",
            code="STATE_MIGRATION.OPERATOR_STATE",
            detail=f"modes {', '.join(sorted(modes))}",
            hint="they must come from one checkpoint",
        )
    mode: str = modes.pop()
    return mode
