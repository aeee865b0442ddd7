"""Each lane of a batch has a heap of blobs of its own; what one of them gives back, all can use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from map_model import packed, reduce_many
from twin.implementations import reclaim

from statebackend._core.core_probe import StateTable
from statebackend._core.kernels import batch_kernels
from statebackend._core.tables.state_core import StateCore

pytestmark = pytest.mark.checked

ROWS = 20_000


def values_for(keys: Any, turn: int) -> list[bytes]:
    # 20 to 43 bytes: two classes of blocks, which change from turn to turn.
    return [b"%020d" % key + b"x" * ((key + turn) % 24) for key in keys.tolist()]


def run_bytes(core: StateCore) -> int:
    reclaim(core)
    return int(core.arena.usage()["run_bytes"])


def test_all_blobs_come_back_whatever_the_number_of_threads(np_rng: np.random.Generator) -> None:
    core = StateCore()
    table = StateTable(core, key="bytes", value="bytes")
    keys = np.arange(ROWS)
    seen = []
    for turn, threads in enumerate([1, 2, 16, 3, 1, 2, 5, 1, 16, 2, 1, 2]):
        order = np_rng.permutation(keys)
        given = values_for(order, turn)
        names = packed([b"key %d" % key for key in order.tolist()])
        batch_kernels.update_many(table, names, packed(given), threads=threads)
        core.arena._check()
        seen.append(run_bytes(core))
        some = order[:50].tolist()
        assert [table.get(b"key %d" % key) for key in some] == given[:50]
    # How many slabs the lanes share depends on who comes first; what were lost would add up over six turns.
    assert max(seen[6:]) <= 1.3 * max(seen[:6])
    batch_kernels.remove_many(table, packed([b"key %d" % key for key in keys.tolist()]), threads=3)
    reclaim(core)
    assert core.arena.usage()["blob_bytes"] == 0
    assert run_bytes(core) < 1 << 20


def growth_by_new_values(before: int, after: int) -> int:
    """Bytes that a table grows by when every second value is put back; `after` 0 means one by one."""
    core = StateCore()
    table = StateTable(core, value="bytes")
    keys = np.arange(ROWS)
    batch_kernels.update_many(table, keys, packed([b"%024d" % key for key in keys.tolist()]), threads=before)
    # No slab becomes empty.
    batch_kernels.remove_many(table, keys[::2].copy(), threads=before)
    full = run_bytes(core)
    values = [b"%024d" % key for key in keys[::2].tolist()]
    if after:
        batch_kernels.update_many(table, keys[::2].copy(), packed(values), threads=after)
    else:
        for key, value in zip(keys[::2].tolist(), values, strict=True):
            table.put(key, value)
    assert len(table) == ROWS
    return run_bytes(core) - full


@pytest.mark.parametrize(("before", "after"), [(16, 1), (16, 0), (1, 2), (2, 1), (3, 2)])
def test_a_lane_takes_the_room_that_others_have_left(before: int, after: int) -> None:
    # Entries grow as well, alike in both; without that room, the values would need 160 KB to 300 KB more.
    assert growth_by_new_values(before, after) <= growth_by_new_values(1, min(after, 1)) + (80 << 10)


def test_byte_keys_that_differ_in_one_byte_are_told_apart() -> None:
    table = StateTable(StateCore(), key="bytes", value="long", hash_mask=0)
    keys = [b""]
    for length in range(1, 71):
        plain = b"k" * length
        keys += [plain[:at] + b"K" + plain[at + 1 :] for at in range(length)]
    rows = [key for key in keys for _ in range(2)]  # enough for the batch to be sorted
    for threads in (1, 2):
        reduce_many(table, packed(rows), np.arange(len(rows)), "last", threads=threads)
        assert len(table) == len(keys)
        found, _ = batch_kernels.get_many(table, packed(rows), threads=threads)
        assert found.tolist() == [2 * (row // 2) + 1 for row in range(len(rows))]
    assert [table.get(key) for key in keys] == [2 * at + 1 for at in range(len(keys))]
    assert table.get(b"k" * 40) is None


@pytest.mark.parametrize("length", [0, 3, 8, 40, 3_000])
def test_blobs_come_back_when_the_first_rows_are_shorter_or_longer_than_the_rest(length: int) -> None:
    table = StateTable(StateCore(), value="bytes")
    keys = np.arange(3_000)
    for few, rest in ((1, length), (length, 1)):
        values = [b"%d" % key * (few if key < 1_024 else rest) for key in keys.tolist()]
        batch_kernels.update_many(table, keys, packed(values))
        (offsets, data), found = batch_kernels.get_many(table, np.append(keys, -1))
        assert data.tobytes() == b"".join(values)
        assert np.diff(offsets).tolist() == [*map(len, values), 0]
        assert found.tolist() == [True] * 3_000 + [False]
