"""Short marks within a long one: they leave no more behind than the changes they kept, and nothing twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from statebackend._core.core_probe import StateTable
from statebackend._core.snapshots.changes import count_changes
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked


def table_of(core: StateCore, value: Any = "long") -> StateTable:
    return StateTable(core, key="int", value=value, max_parallelism=4)


def test_a_change_is_journalled_once_however_many_marks_come_between() -> None:
    core = StateCore()
    table, other = table_of(core), table_of(core)
    table.put(1, 0)
    batch = core.mark()
    for n in range(1000):
        table.put(1, n)
        short = core.mark()
        other.put(2, n)
        core.release(short)
    # The first write of each; `other` writes once for each short mark, which might be rolled back to.
    assert core.changes_since(batch) <= 1 + 1000
    before = core.metrics()["run_bytes"]
    for n in range(1000):
        table.put(1, n)
        core.release(core.mark())
    assert core.metrics()["run_bytes"] == before
    core.rollback(batch)
    assert (table.get(1), other.get(2)) == (0, None)


@pytest.mark.parametrize("value", ["long", "bytes", "object"])
def test_a_mark_knows_the_tables_that_were_written_since(rng: random.Random, value: str) -> None:
    """Whatever marks and snapshots come and go: no table is missed, none is named that nobody has touched, and a
    rollback brings back what there was."""
    core = StateCore()
    tables = [table_of(core, value) for _ in range(12)]
    held: list[dict[int, Any]] = [{} for _ in tables]
    marks: list[Any] = []
    then: list[list[dict[int, Any]]] = []  # what the tables held at each mark
    touched: list[set[int]] = []  # since each mark
    views: list[Any] = []
    for step in range(4_000):
        chance = rng.random()
        if chance < 0.5:
            at, key = rng.randrange(len(tables)), rng.randrange(6)
            if rng.random() < 0.3:
                tables[at].remove(key)
                held[at].pop(key, None)
            else:
                held[at][key] = {"long": step, "bytes": b"%d" % step, "object": ("object", step)}[value]
                tables[at].put(key, held[at][key])
            for since in touched:
                since.add(at)
        elif chance < 0.7:
            marks.append(core.mark())
            then.append([dict(each) for each in held])
            touched.append(set())
        elif chance < 0.82 and marks:
            at = rng.choice([0, len(marks) - 1, rng.randrange(len(marks))])
            core.release(marks.pop(at))
            del then[at], touched[at]
        elif chance < 0.88 and marks:
            at = rng.randrange(len(marks))
            core.rollback(marks[at])
            held = [dict(each) for each in then[at]]
            del marks[at + 1 :], then[at + 1 :], touched[at + 1 :]
            assert [{entry.key: entry.value for entry in table} for table in tables] == held
        elif chance < 0.94:
            views.append(core.snapshot())
        elif views:
            views.pop(rng.randrange(len(views))).release()
        if step % 20 == 0:
            core._check()
            for mark, since in zip(marks, touched, strict=True):
                named = core.written_since(mark)
                changed = {at for at, table in enumerate(tables) if count_changes(table, mark) != (0, 0)}
                assert len(named) == len({*named})
                assert (
                    {tables[at].journal for at in changed} <= {*named} <= {tables[at].journal for at in since}
                )
    for view in views:
        view.release()
    for mark in marks:
        core.release(mark)
    while core.advance():
        pass
    core._check()
