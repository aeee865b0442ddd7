"""States in event time go by the time of rows, which comes in disorder; they are cleaned up by the watermark."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from all_backends import BACKENDS
from contract.conftest import Keyed, MakeKeyed
from event_days import in_event_time

import statebackend as sb
from statebackend.testing import ManualClock

pytestmark = pytest.mark.checked

TTL = 100


UpdateType = sb.StateTtlConfig.UpdateType


KINDS: dict[str, Any] = {
    "value": lambda: sb.ValueStateDescriptor("s", int),
    "text": lambda: sb.ValueStateDescriptor("s", str),
    "object": lambda: sb.ValueStateDescriptor("s", sb.types.PICKLE),
    "list": lambda: sb.ListStateDescriptor("s", int),
    "map": lambda: sb.MapStateDescriptor("s", int, int),
    "reducing": lambda: sb.ReducingStateDescriptor("s", "sum", int),
    "own reducing": lambda: sb.ReducingStateDescriptor("s", lambda a, b: a + b, int),
    "aggregating": lambda: sb.AggregatingStateDescriptor("s", "sum", type=int),
}


def state_of(keyed: Keyed, kind: str, **options: Any) -> Any:
    return keyed.get_state(in_event_time(KINDS[kind](), TTL, **options))


def write(state: Any, kind: str, number: int = 1) -> None:
    if kind == "map":
        state.put(number, number)
    elif kind in ("value", "text", "object"):
        state.update(str(number) if kind == "text" else number)
    else:
        state.add(number)


def read(state: Any, kind: str) -> Any:
    if kind == "map":
        return sorted(state.keys())
    if kind == "list":
        return list(state.get())
    return state.value() if kind in ("value", "text", "object") else state.get()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_state_is_stamped_and_read_by_the_time_that_is_set(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed(clock=ManualClock(10**9))
    state = state_of(keyed, kind)
    keyed.begin(10**9, (None, 5000))
    keyed.set_current_key(1)
    keyed.set_event_time(1000)
    write(state, kind)
    for at, there in ((999, True), (1099, True), (0, True), (-(2**62), True), (1100, False)):
        keyed.set_event_time(at)
        assert state.exists() == there, at
    keyed.set_event_time(1099)
    assert read(state, kind)
    keyed.set_event_time(1100)
    assert not read(state, kind)
    keyed.set_event_time(1099)
    assert read(state, kind), (
        "an on-time row may come later with an earlier time: the read has removed nothing"
    )
    for watermark, is_left in ((1099, True), (1100, False)):
        keyed.begin(watermarks=(watermark, 5000))
        keyed.set_event_time(1100)
        assert not read(state, kind)
        assert keyed.num_entries("s") == is_left


@pytest.mark.parametrize("of", ["reducing", "own reducing", "aggregating"])
def test_an_added_value_keeps_the_later_timestamp_unless_cleared(make_keyed: MakeKeyed, of: str) -> None:
    keyed = make_keyed()
    state = state_of(keyed, of)
    keyed.begin(watermarks=(None, 1000))
    for key in range(5):
        keyed.set_event_time(1040)
        keyed.set_current_key(key)
        state.add(1)
    keyed.set_event_time(1000)
    keyed.set_current_key(0)
    state.add(1)
    state.add_many([1, 2, 3], [1, None, 1])
    state.add_many([2, 3, 4], [1, 1, None], times=[1000] * 3)
    state.add_many([4, 4], [1, 1])
    for at, left in ((1099, 5), (1100, 3), (1139, 3), (1140, 0)):
        keyed.set_event_time(at)
        assert len(list(keyed.keys("s"))) == left, at


@pytest.mark.usefixtures("incremental_cleanup")
def test_accesses_clean_up_by_the_watermark_before_the_batch(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed()
    state = state_of(keyed, kind)
    keyed.begin(watermarks=(None, 1000))
    for key in range(20):
        keyed.set_current_key(key)
        write(state, kind)
    keyed.begin(watermarks=(1099, 9000))
    keyed.set_event_time(8000)
    for key in range(100, 150):
        keyed.set_current_key(key)
        write(state, kind)
    assert keyed.num_entries("s") == 70
    keyed.set_event_time(1099)
    keyed.set_current_key(7)
    assert read(state, kind)
    keyed.begin(watermarks=(1100, 9000))
    keyed.set_event_time(8000)
    for key in range(100, 150):
        keyed.set_current_key(key)
        write(state, kind)
    assert keyed.num_entries("s") == 50


@pytest.mark.parametrize("in_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("belated", [1, TTL // 2, TTL, 10 * TTL])
def test_late_rows_are_cleaned_up_too(
    make_keyed: MakeKeyed, backend: sb.StateBackend, kind: str, belated: int, in_columns: bool
) -> None:
    """What is known of the oldest timestamps must not hide one that a late row has written."""
    idle = {"cleanup_idle": True, "cleanup_in_background": False}
    for cleanup in (idle, {}) if backend.cleans_up_incrementally else (idle,):
        keyed = make_keyed()
        state = state_of(keyed, kind, **cleanup)

        def clean(keyed: Any = keyed, state: Any = state) -> None:
            keyed.advance()
            keyed.set_current_key(999)
            for _ in range(100):
                state.clear()

        watermark, written = 10_000, []
        for _ in range(40):
            keyed.begin(watermarks=(watermark, watermark))
            times = [watermark, watermark - belated, watermark - TTL // 2]
            keys = range(len(written), len(written) + 3)
            written += times
            if in_columns:
                write_many(state, kind, keys, 1, times=times)
            for key, at in zip(keys, times, strict=True) if not in_columns else ():
                keyed.set_current_key(key)
                keyed.set_event_time(at)
                write(state, kind)
            clean()
            watermark += 7
        keyed.begin(watermarks=(watermark, watermark))
        clean()
        if cleanup:
            assert keyed.num_entries("s") == sum(at > watermark - TTL for at in written)
        keyed.begin(watermarks=(watermark + TTL, watermark + TTL))
        clean()
        assert keyed.num_entries("s") == 0


def test_enumeration_uses_the_time_that_is_set(make_keyed: MakeKeyed, kind: str) -> None:
    keyed = make_keyed()
    state = state_of(keyed, kind)
    keyed.begin(watermarks=(None, 1099))
    for key in (1, 2):
        keyed.set_current_key(key)
        keyed.set_event_time(1000 * key)
        write(state, kind)
    for at, keys in ((1000, [1, 2]), (1100, [2]), (2100, [])):
        keyed.set_event_time(at)
        assert sorted(keyed.keys("s")) == keys
    keyed.set_event_time(2050)
    assert state.exists_many([1, 2]).to_pylist() == [True, True], "by the watermark after the batch"
    keyed.set_current_key(1)
    assert not state.exists(), "by the row's again"


def test_time_is_set_within_a_batch_of_rows(make_keyed: MakeKeyed) -> None:
    keyed = make_keyed()
    with pytest.raises(sb.UsageError, match="lacks event time"):
        keyed.set_event_time(5)
    for wrong in (1.5, "now", True, 2**63):
        with pytest.raises(sb.UsageError):
            keyed.begin(watermarks=(None, wrong))  # type: ignore[arg-type]
        with pytest.raises(sb.UsageError):
            keyed.begin(watermarks=(wrong, None))  # type: ignore[arg-type]
    with pytest.raises(sb.UsageError, match="lacks event time"):
        keyed.set_event_time(5)
    keyed.begin(watermarks=(None, None))
    with pytest.raises(sb.UsageError):
        keyed.set_event_time(2**63)
    keyed.close()
    for call in (lambda: keyed.begin(watermarks=(None, 1)), lambda: keyed.set_event_time(1)):
        with pytest.raises(sb.ClosedError):
            call()


def test_full_snapshots_leave_out_what_had_expired_by_the_committed_watermark(
    make_keyed: MakeKeyed, tmp_path: Path, kind: str
) -> None:
    keyed = make_keyed()
    state = state_of(keyed, kind, cleanup_full_snapshot=True, cleanup_in_background=False)
    store = sb.CheckpointStore(tmp_path).open_for_writing(key_type=int, max_parallelism=128)

    def checkpoint(number: int, watermark: int) -> list[Any]:
        keyed.begin(watermarks=(watermark, watermark))
        pending = keyed.snapshot(number, store, incremental=False)
        committed = store.commit(number, [pending.result()], watermark=watermark)
        again = make_keyed(restore=committed)
        again.begin(watermarks=(None, None))
        state_of(again, kind)
        return sorted(again.keys("s"))

    with store:
        keyed.begin(watermarks=(None, 1100))
        for key in (1, 2):
            keyed.set_current_key(key)
            keyed.set_event_time(1000 * key)
            write(state, kind)
        assert checkpoint(0, 1099) == [1, 2]
        assert checkpoint(1, 1100) == [1, 2], "committed is 1099"
        assert checkpoint(2, 1100) == [2]


@pytest.mark.parametrize("stored_as", ["checkpoint", "savepoint"])
def test_restored_state_uses_the_restored_watermark_until_the_next(
    make_keyed: MakeKeyed, tmp_path: Path, clock: ManualClock, kind: str, stored_as: str
) -> None:
    """By the clock, which is far ahead of the rows, whatever is read or written first would be gone."""
    watermark = 50
    clock.set(1_000_000)
    keyed = make_keyed()
    keyed.begin(watermarks=(watermark, watermark))
    state = state_of(keyed, kind, cleanup_full_snapshot=True)
    for key in range(5):
        keyed.set_current_key(key)
        write(state, kind)
    with sb.CheckpointStore(tmp_path / "store").open_for_writing(key_type=int, max_parallelism=128) as store:

        def restored(keyed: Any, number: int) -> Any:
            if stored_as == "savepoint":
                stored: Any = keyed.savepoint(tmp_path / f"savepoint {number}")
            else:
                snapshot = keyed.snapshot(number, store, incremental=False).result()
                stored = store.commit(number, [snapshot], now=1_000_000, watermark=watermark)
            return make_keyed(restore=stored)

        again = restored(keyed, 0)
        again = restored(again, 1)  # with the state that nobody has asked for
        state = state_of(again, kind, cleanup_full_snapshot=True)
        again.release(again.mark())
        for key in range(3):
            again.set_current_key(key)
            if key == 0:
                assert read(state, kind)
            elif key == 1:
                assert state.exists()
            else:
                write(state, kind, 2)
        again.advance()
        again = restored(again, 2)
        state = state_of(again, kind)
        again.begin(watermarks=(watermark, watermark))
        assert sorted(again.keys("s")) == [0, 1, 2, 3, 4]
        again.begin(watermarks=(1_000_000, 1_000_000))
        assert list(again.keys("s")) == [], "from now on it goes by what it was told"


def test_state_without_a_watermark_uses_the_clock(make_keyed: MakeKeyed, tmp_path: Path) -> None:
    """Restored from a backend that was told the time of batches, but never one of rows."""
    keyed = make_keyed()
    keyed.begin(1_000)
    keyed.set_current_key(1)
    write(state_of(keyed, "value"), "value")
    again = make_keyed(restore=keyed.savepoint(tmp_path / "savepoint"))
    state = state_of(again, "value")
    for now, there in ((1_099, True), (1_100, False)):
        again.begin(now)
        again.set_current_key(1)
        assert state.exists() == there


def test_a_vectorised_write_within_a_row_is_seen_by_the_row(make_keyed: MakeKeyed) -> None:
    """It goes by the watermark, which is before the time of the row: what the row saw expired is back."""
    keyed = make_keyed()
    state = keyed.get_state(in_event_time(KINDS["map"](), 200, cleanup_in_background=False))
    keyed.begin(watermarks=(None, 900))
    keyed.set_current_key(1)
    keyed.set_event_time(790)
    state.put(1, 1)
    state.put(2, 2)
    keyed.set_event_time(1000)
    assert not state.exists()
    state.put_many([1], [1], [5])
    assert state.exists()
    assert not state.is_empty()
    assert list(keyed.keys("s")) == [1]
    assert list(state.items()) == [(1, 5)]


def write_many(state: Any, kind: str, keys: Any, number: int, **options: Any) -> None:
    values = [str(number) if kind == "text" else number] * len(keys)
    if kind == "map":
        state.put_many(keys, values, values, **options)
    elif kind in ("value", "text", "object"):
        state.update_many(keys, values, **options)
    else:
        state.add_many(keys, values, **options)


def run_both(rng: random.Random, kind: str, options: dict[str, Any]) -> None:
    """The same calls on all backends: rows of any time, batches, marks; what they see is the same."""
    each = [sb.create_backend(name).create_keyed_backend(int, clock=ManualClock()) for name in BACKENDS]
    states = [state_of(keyed, kind, **options) for keyed in each]
    before = after = None
    for _ in range(40):
        before, after = after, (after or 1000) + rng.choice([0, 5, 40, 300])
        marks = [keyed.mark() for keyed in each]
        for keyed in each:
            keyed.begin(watermarks=(before, after))
        for _ in range(rng.randrange(25)):
            key, at, number = rng.randrange(12), rng.randint(0, after + 50), rng.randrange(5)
            step = rng.randrange(7)
            seen = []
            for keyed, state in zip(each, states, strict=True):
                keyed.set_current_key(key)
                keyed.set_event_time(at)
                if step < 2:
                    write(state, kind, number)
                elif step == 2:
                    seen.append(state.exists())
                elif step == 3:
                    seen.append(read(state, kind))
                elif step == 4:
                    seen.append(sorted(keyed.keys("s")))
                elif step == 5:
                    write_many(state, kind, [key, (key + 1) % 12], number)
                    seen.append((state.exists(), sorted(keyed.keys("s"))))
                else:
                    seen.append(state.exists_many(list(range(12))).to_pylist())
            assert seen[:1] * len(seen) == seen
        back = rng.random() < 0.2
        for keyed, mark in zip(each, marks, strict=True):
            if back:
                keyed.rollback(mark)
            keyed.release(mark)
            keyed.begin(watermarks=(after, after))
            keyed.advance()
        keys = [sorted(keyed.keys("s")) for keyed in each]
        assert keys[0] == keys[1]
        if options.get("cleanup_idle"):
            assert each[0].num_entries("s") == len(keys[0])
    for keyed in each:
        keyed.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("update", [UpdateType.OnCreateAndWrite, UpdateType.OnReadAndWrite])
def test_any_use_with_late_rows_is_seen_alike(kind: str, update: Any, rng: random.Random) -> None:
    """Nothing cleans up but reads and ``advance``: what a late row sees depends on what has been cleaned up."""
    options = {"cleanup_in_background": False, "update_type": update}
    run_both(rng, kind, options)
    run_both(rng, kind, {**options, "cleanup_idle": True})
