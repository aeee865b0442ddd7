"""What changed since a mark, as rows: exactly the keys of the dirty set, each once, as they are now."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from statebackend._core.core_probe import MapTable, StateTable
from statebackend._core.kernels.batch_kernels import remove_many, update_many
from statebackend._core.snapshots.changes import changed_entries, count_changes
from statebackend._core.tables.state_core import StateCore
from statebackend.errors import UsageError

pytestmark = pytest.mark.checked


def keys_in(rows, is_blob):
    columns = rows.keys()
    if not is_blob:
        return columns["key"].tolist()
    ends, data = columns["key_offsets"].tolist(), columns["key"].tobytes()
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("hash_mask", [0xFFFFFFFF, 3])
@pytest.mark.parametrize("is_blob", [False, True])
def test_changes_are_the_dirty_set_with_present_values(is_blob, hash_mask):
    rng = random.Random(7 + is_blob)
    core = StateCore()
    table = StateTable(core, key="bytes" if is_blob else "int", max_parallelism=8, hash_mask=hash_mask)

    def key():
        number = rng.randrange(300)
        return str(number).encode() if is_blob else number

    model = {}
    views = []
    for _ in range(60):
        mark = core.mark()
        puts_only, inner = rng.random() < 0.5, []
        for _ in range(rng.randrange(200)):
            if rng.random() < 0.01:
                inner.append(core.mark())
            where, action = key(), rng.random() * (0.7 if puts_only else 1)
            if action < 0.7:
                model[where] = rng.randrange(1000)
                table.put(where, model[where])
            elif action < 0.95:
                model.pop(where, None)
                table.remove(where)
            elif len(views) < 3:
                views.append(core.snapshot())
            else:
                views.pop(rng.randrange(3)).release()
        for each in rng.sample(inner, rng.randint(0, len(inner))):
            core.release(each)
        dirty = {found for found, _ in table.dirty(mark)}
        rows = changed_entries(table, mark)
        assert core.changes_since(mark) >= len(dirty)
        live, gone = rows.take(rows.is_live), rows.take(~rows.is_live)
        assert sorted(keys_in(live, is_blob) + keys_in(gone, is_blob)) == sorted(dirty)
        found = dict(zip(keys_in(live, is_blob), live.columns()["value"].tolist(), strict=True))
        assert found == {each: model[each] for each in dirty if each in model}
        assert not set(keys_in(gone, is_blob)) & set(model)
        assert rows.groups.tolist() == sorted(rows.groups.tolist())
        assert [table.group_of(each) for each in keys_in(live, is_blob)] == live.groups.tolist()
        if rng.random() < 0.5:
            core.rollback(mark)
            assert len(changed_entries(table, mark)) == 0
            model = {entry.key: entry.value for entry in table}
        core.release(mark)
        table._check()


@pytest.mark.parametrize("is_shrinking", [False, True])
def test_changed_entries_are_current_after_entries_moved(is_shrinking):
    core = StateCore()
    table = StateTable(core, max_parallelism=4)
    keys = np.arange(50_000)
    update_many(table, keys, keys)
    if is_shrinking:  # entries move on while others are written
        remove_many(table, keys[1000:])
        keys = keys[:1000]
    for view in (None, core.snapshot(), None):  # after the view, entries move together
        mark = core.mark()
        for new in range(1, 4):
            update_many(table, keys, keys + new)
        rows = changed_entries(table, mark)
        assert rows.is_live.all()
        found = rows.columns()
        assert np.array_equal(found["value"], found["key"] + new)
        assert np.array_equal(np.sort(found["key"]), keys)
        assert count_changes(table, mark) == (len(keys), 0)
        core.release(mark)
        if view is not None:
            view.release()
    table._check()


def test_anchors_name_their_keys_through_clones_removals_and_rollbacks():
    rng = random.Random(3)
    core = StateCore()
    maps = MapTable(core, max_parallelism=4, hash_mask=7)
    model: dict[int, dict[int, int]] = {}
    views = []
    for _ in range(60):
        mark = core.mark()
        before = {key: dict(entries) for key, entries in model.items()}
        for _ in range(rng.randrange(60)):
            key, map_key, action = rng.randrange(12), rng.randrange(4), rng.random()
            if action < 0.55:
                maps.put(key, map_key, rng.randrange(100))
                model.setdefault(key, {})[map_key] = maps.get(key, map_key)
            elif action < 0.85:
                maps.remove(key, map_key)
                model.get(key, {}).pop(map_key, None)
                if not model.get(key, {1: 1}):
                    del model[key]
            elif action < 0.95:
                maps.clear(key)
                model.pop(key, None)
            elif len(views) < 3:
                views.append(core.snapshot())
            else:
                views.pop(rng.randrange(3)).release()
        maps._check()
        rows = changed_entries(maps.entries, mark)
        heads = rows.heads(maps.heads)
        live = rows.is_live & heads.is_live
        owners = keys_in(heads.take(live), False)
        found = {}
        columns = rows.take(live).columns()
        for key, map_key, value in zip(
            owners, columns["key"].tolist(), columns["value"].tolist(), strict=True
        ):
            found[key, map_key] = value
        assert all(model[key][map_key] == value for (key, map_key), value in found.items())
        changed = {
            (key, map_key)
            for key, entries in model.items()
            for map_key, value in entries.items()
            if before.get(key, {}).get(map_key) != value
        }
        assert changed <= set(found)
        entries, earlier = ({(key, k) for key in each for k in each[key]} for each in (model, before))
        assert count_changes(maps.entries, mark) == (len(found), len(earlier - entries))
        if rng.random() < 0.5:
            core.rollback(mark)
            maps._check()
            model = before
        core.release(mark)


def test_rows_are_good_until_the_next_call():
    core = StateCore()
    table = StateTable(core)
    mark = core.mark()
    table.put(1, 1)
    rows = changed_entries(table, mark)
    table.put(2, 2)
    with pytest.raises(UsageError, match="has been called since"):
        rows.keys()


def test_loaded_rows_are_not_changes_and_stay_after_a_rollback():
    core = StateCore()
    table = StateTable(core)
    mark = core.mark()
    table.put(1, 1)
    core.begin_load()
    update_many(table, np.arange(100, 200), np.arange(100))
    core.end_load()
    table.put(100, -1)
    table.put(2, 2)
    assert {key for key, _ in table.dirty(mark)} == {1, 2, 100}
    core.rollback(mark)
    assert len(table) == 100
    assert table.get(100) == 0
    core.release(mark)
    table._check()


def test_key_groups_are_read_together_in_order():
    core = StateCore()
    table = StateTable(core, max_parallelism=8)
    update_many(table, np.arange(1000), np.arange(1000))
    with core.snapshot() as view:
        table.put(0, -1)
        sizes = view.group_sizes(table)
        assert sizes.tolist() == [view.group_sizes(table)[group] for group in range(8)]
        keys = view.rows(table, 2, 5).keys()["key"].tolist()
        assert [table.group_of(key) for key in keys] == np.repeat([2, 3, 4, 5], sizes[2:6]).tolist()
        assert view.rows(table, 0, 7).columns()["value"].min() == 0


def test_rows_weigh_what_their_keys_texts_and_lists_hold():
    core = StateCore()
    texts = StateTable(core, key="bytes", value="bytes", max_parallelism=1)
    lists = StateTable(core, value=("list", "bytes"), max_parallelism=1)
    texts.put(b"key", b"seven b")
    for text in (b"ab", b"", b"cde"):
        lists.append(1, text)
    with core.snapshot() as view:
        assert view.rows(texts, 0, 0).weights().tolist() == [3 + 7]
        assert view.rows(lists, 0, 0).weights().tolist() == [3 * 8 + 5]


# --- how many keys were written and removed since a mark, without their rows ---


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
def test_counts_equal_the_model(is_blob, hash_mask, removals):
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
