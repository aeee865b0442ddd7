"""How many keys were written and removed since a mark, without their rows: what the model says, whatever was done."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from statebackend._core.batches.kernels import update_many
from statebackend._core.core_probe import StateTable
from statebackend._core.snapshots.changes import count_changes
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


class Watched:
    """What a table held when a mark was opened, and which keys were written since."""

    def __init__(self, core: StateCore, model: dict[Any, Any]) -> None:
        self.mark = core.mark()
        self.before = set(model)
        self.written: set[Any] = set()

    def counts(self, model: dict[Any, Any]) -> tuple[int, int]:
        return len(self.written & set(model)), len(self.before - set(model))


@pytest.mark.parametrize("hash_mask", [0xFFFFFFFF, 3])
@pytest.mark.parametrize("is_blob", [False, True])
@pytest.mark.parametrize("removals", [0.0, 0.25])
def test_counts_are_those_of_the_model(is_blob, hash_mask, removals):
    rng = random.Random(11 + is_blob)
    core = StateCore()
    table = StateTable(core, key="bytes" if is_blob else "int", max_parallelism=8, hash_mask=hash_mask)
    model: dict[Any, int] = {}
    views: list[Any] = []
    marks: list[Watched] = []
    seen = set()
    for _ in range(60):
        marks.append(Watched(core, model))
        for _ in range(rng.randrange(150)):
            number = rng.randrange(300)
            key, action = str(number).encode() if is_blob else number, rng.random()
            if action < removals:
                model.pop(key, None)
                table.remove(key)
            elif action < 0.97:
                model[key] = rng.randrange(1000)
                table.put(key, model[key])
                for each in marks:
                    each.written.add(key)
            elif len(views) < 3:
                views.append(core.snapshot())
            else:
                views.pop(rng.randrange(3)).release()
        for each in marks:
            assert count_changes(table, each.mark) == each.counts(model)
            seen.add(each.counts(model)[1] > 0)
        if rng.random() < 0.3:
            back = rng.randrange(len(marks))
            core.rollback(marks[back].mark)
            model = {entry.key: entry.value for entry in table}
            del marks[back + 1 :]
            # Those before it have seen less: whatever the mark had not seen was undone.
            for each in marks[:back]:
                each.written = {key for key, _ in table.dirty(each.mark)}
            marks[back].written.clear()
            assert count_changes(table, marks[back].mark) == (0, 0)
        while marks and rng.random() < 0.4:
            core.release(marks.pop(rng.randrange(len(marks))).mark)
    assert seen == ({True, False} if removals else {False})


def test_lists_and_objects_count_once_however_often_they_change():
    core = StateCore()
    lists = StateTable(core, value=("list", "long"))
    objects = StateTable(core, value="object", copy_value=list)
    lists.append(1, 10)
    objects.put(1, [10])
    objects.put(2, [20])
    mark = core.mark()
    for number in range(5):
        lists.append(1, number)
        lists.append(2, number)
        objects.put(1, [number])
    objects.get(2)  # which may copy it: no change
    assert count_changes(lists, mark) == (2, 0)
    assert count_changes(objects, mark) == (1, 0)


def test_a_batch_counts_its_distinct_keys():
    core = StateCore()
    table = StateTable(core)
    update_many(table, np.arange(100), np.arange(100))
    mark = core.mark()
    with core.snapshot():  # entries are cloned, then written
        update_many(table, np.repeat(np.arange(50, 150), 3), np.arange(300))
    assert count_changes(table, mark) == (100, 0)
    later = core.mark()
    update_many(table, np.arange(0, 60), np.arange(60))
    assert count_changes(table, later) == (60, 0)
    assert count_changes(table, mark) == (150, 0)


def test_only_an_open_mark_counts():
    core = StateCore()
    table = StateTable(core)
    mark = core.mark()
    core.release(mark)
    with pytest.raises(UsageError, match="no longer valid"):
        count_changes(table, mark)
