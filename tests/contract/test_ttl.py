"""Rules of time to live, each once: its configuration, expiry, renewal, visibility, cleanup, merges and marks.

`test_ttl_model` has the same rules as a model, for random use.
"""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from contract.conftest import Keyed, MakeKeyed
from contract.samples import KINDS, Kind

import statebackend as sb
from statebackend.state.ttl import MAX_TIMESTAMP, expiration_timestamp, expired, newest_expired
from statebackend.testing import ManualClock
from statebackend.types import PICKLE, STRING

pytestmark = pytest.mark.checked

TTL = 100
UpdateType = sb.StateTtlConfig.UpdateType
OnWrite, OnRead = UpdateType.OnCreateAndWrite, UpdateType.OnReadAndWrite
Visibility = sb.StateTtlConfig.StateVisibility
Never, Show = Visibility.NeverReturnExpired, Visibility.ReturnExpiredIfNotCleanedUp
Time = sb.StateTtlConfig.TtlTimeCharacteristic

CLEANUPS: dict[str, dict[str, Any]] = {
    "default": {},
    "off": {"cleanup_in_background": False},
    "often": {"cleanup_incrementally": (1_000, True)},
    "slowly": {"cleanup_incrementally": (1, False)},
    "snapshot": {"cleanup_full_snapshot": True, "cleanup_in_background": False},
    "rocksdb": {"cleanup_in_rocksdb_compact_filter": (10,), "cleanup_in_background": False},
    "idle": {"cleanup_idle": True, "cleanup_in_background": False},
}


each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.fixture
def keyed(make_keyed: MakeKeyed) -> Keyed:
    return make_keyed(max_parallelism=4)


class At:
    """Sets the clock, then the current key: the time is read there."""

    def __init__(self, keyed: Keyed, clock: ManualClock) -> None:
        self._keyed, self._clock = keyed, clock

    def __call__(self, now: int, key: int = 1) -> None:
        self._clock.set(now)
        self._keyed.set_current_key(key)


@pytest.fixture
def at(keyed: Keyed, clock: ManualClock) -> At:
    return At(keyed, clock)


def with_ttl(descriptor: Any, **options: Any) -> Any:
    if options.get("state_visibility") is Show:  # whatever cleanup has not removed yet: let there be none
        options["cleanup_in_background"] = False
    return descriptor.enable_time_to_live(sb.StateTtlConfig(TTL, **options))


def state_of(keyed: Keyed, kind: Kind, **options: Any) -> Any:
    return keyed.get_state(with_ttl(kind.descriptor("s", STRING), **options))


def test_defaults_are_flinks() -> None:
    config = sb.StateTtlConfig.new_builder(timedelta(seconds=1)).build()
    assert config.ttl == 1000
    assert config.update_type is OnWrite
    assert config.state_visibility is Never
    assert config.ttl_time_characteristic is Time.ProcessingTime
    assert config.incremental_cleanup == (5, False)
    assert config.rocksdb_cleanup == (1000, 30 * 24 * 3_600_000)
    assert not config.cleanup_full_snapshot
    assert not config.cleanup_idle
    assert config.cleanup_in_background


BUILT: list[tuple[Any, dict[str, Any]]] = [
    (lambda b: b.set_ttl(7), {"ttl": 7}),
    (lambda b: b.set_update_type(UpdateType.Disabled), {"update_type": UpdateType.Disabled}),
    (lambda b: b.update_ttl_on_create_and_write(), {"update_type": OnWrite}),
    (lambda b: b.update_ttl_on_read_and_write(), {"update_type": OnRead}),
    (lambda b: b.never_return_expired(), {"state_visibility": Never}),
    (lambda b: b.return_expired_if_not_cleaned_up(), {"state_visibility": Show}),
    (lambda b: b.set_state_visibility(Show), {"state_visibility": Show}),
    (lambda b: b.use_processing_time(), {"ttl_time_characteristic": Time.ProcessingTime}),
    (lambda b: b.set_ttl_time_characteristic(Time.EventTime), {"ttl_time_characteristic": Time.EventTime}),
    (lambda b: b.cleanup_full_snapshot(), {"cleanup_full_snapshot": True}),
    (lambda b: b.cleanup_incrementally(9, True), {"cleanup_incrementally": (9, True)}),
    (lambda b: b.cleanup_in_rocksdb_compact_filter(10), {"cleanup_in_rocksdb_compact_filter": (10,)}),
    (
        lambda b: b.cleanup_in_rocksdb_compact_filter(10, periodic_compaction_time=timedelta(days=1)),
        {"cleanup_in_rocksdb_compact_filter": (10, 24 * 3_600_000)},
    ),
    (lambda b: b.disable_cleanup_in_background(), {"cleanup_in_background": False}),
]


@pytest.mark.parametrize(("build", "keywords"), BUILT)
def test_builder_and_keywords_agree(build: Any, keywords: dict[str, Any]) -> None:
    builder = sb.StateTtlConfig.new_builder(5)
    assert build(builder) is builder
    config = sb.StateTtlConfig(**{"ttl": 5, **keywords})
    assert builder.build() == config
    assert hash(builder.build()) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config


def test_configured_cleanups_stay_without_background_cleanup() -> None:
    kept = sb.StateTtlConfig(5, cleanup_in_background=False, cleanup_incrementally=(3, True))
    assert kept.incremental_cleanup == (3, True)
    assert kept.rocksdb_cleanup is None
    assert sb.StateTtlConfig(5, cleanup_in_background=False).incremental_cleanup is None


@pytest.mark.parametrize("ttl", [1, np.int64(1), timedelta(milliseconds=1), "1 ms", "0.001 Seconds"])
def test_a_duration_is_milliseconds_a_timedelta_or_a_text(ttl: Any) -> None:
    config = sb.StateTtlConfig(ttl)
    assert config.ttl == 1
    assert type(config.ttl) is int


BAD_TTL = [0, -1, 1.0, True, None, 2**63, timedelta(0), timedelta(-1), timedelta(microseconds=1)]
BAD_TTL += ["1 month", "1", "", "1 h or so", "1.5 ms"]
DURATION, SIZE = "write milliseconds as an int, a datetime.timedelta, or a text", r"\(5, False\)"
FILTER = "query_time_after_num_entries"


@pytest.mark.parametrize(
    ("keywords", "hint"),
    [
        *(({"ttl": ttl}, DURATION) for ttl in BAD_TTL),
        ({"update_type": "OnReadAndWrite"}, "StateTtlConfig.UpdateType.OnReadAndWrite"),
        ({"update_type": 1}, "StateTtlConfig.UpdateType.Disabled"),
        ({"update_type": Never}, "UpdateType"),
        ({"state_visibility": True}, "StateTtlConfig.StateVisibility.NeverReturnExpired"),
        ({"ttl_time_characteristic": "EventTime"}, "StateTtlConfig.TtlTimeCharacteristic.EventTime"),
        ({"time": "Event"}, "'processing' or 'event'"),
        ({"time": "processing", "ttl_time_characteristic": Time.EventTime}, "one of them"),
        ({"cleanup_full_snapshot": 1}, "True or False"),
        ({"cleanup_in_background": None}, "True or False"),
        ({"cleanup_idle": "yes"}, "True or False"),
        ({"cleanup_incrementally": 5}, SIZE),
        ({"cleanup_incrementally": (0, False)}, SIZE),
        ({"cleanup_incrementally": (1.5, False)}, SIZE),
        ({"cleanup_incrementally": (5, 1)}, "True or False"),
        ({"cleanup_in_rocksdb_compact_filter": 1000}, FILTER),
        ({"cleanup_in_rocksdb_compact_filter": (0,)}, FILTER),
        ({"cleanup_in_rocksdb_compact_filter": (1, -1)}, "timedelta"),
        ({"legacy_timestamp": 1.5}, "milliseconds"),
        ({"legacy_timestamp": datetime(2024, 1, 1)}, "time zone"),
    ],
    ids=repr,
)
def test_bad_option_is_refused_with_a_correction(keywords: dict[str, Any], hint: str) -> None:
    with pytest.raises(sb.UsageError, match=f"Hint: .*{hint}"):
        sb.StateTtlConfig(**{"ttl": 1, **keywords})
    if "ttl" in keywords:
        for builder in (
            sb.StateTtlConfig.new_builder(**keywords),
            sb.StateTtlConfig.new_builder(1).set_ttl(**keywords),
        ):
            with pytest.raises(sb.UsageError, match=f"Hint: {hint}"):
                builder.build()


def test_the_time_may_be_a_word() -> None:
    assert sb.StateTtlConfig("1 hour", time="event") == sb.StateTtlConfig(
        3_600_000, ttl_time_characteristic=Time.EventTime
    )
    assert sb.StateTtlConfig(1, time="processing") == sb.StateTtlConfig(1)


@pytest.mark.parametrize(
    ("given", "expected"), [("512m", 512 << 20), ("1 GB", 1 << 30), ("0.5k", 512), ("7b", 7), (9, 9)]
)
def test_a_size_is_bytes_or_a_text(given: Any, expected: int) -> None:
    assert sb.create_backend("heap", max_bytes=given).max_bytes == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("given", ["512", "1 mib", "0.3b", -1, 1.0, True, None, 2**63])
def test_a_wrong_size_is_refused_with_the_units(given: Any) -> None:
    with pytest.raises(sb.UsageError, match="Hint: .*b, k, m, g, t and p") as caught:
        sb.create_backend("heap", max_bytes=given)
    assert caught.value.code == "USAGE.SIZE"


def test_a_legacy_timestamp_may_be_a_datetime() -> None:
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
    assert sb.StateTtlConfig(1, legacy_timestamp=at).legacy_timestamp == 1000


def test_a_config_cannot_be_changed() -> None:
    config = sb.StateTtlConfig(1)
    with pytest.raises(AttributeError):
        config.ttl = 2
    with pytest.raises(AttributeError):
        del config.ttl


@pytest.mark.parametrize(
    ("timestamp", "ttl", "expires"),
    [
        (0, 1, 1),
        (5, 10, 15),
        (-5, 10, 5),
        (2**63 - 1, 1, 2**63 - 1),
        (2**63 - 5, 100, 2**63 - 1),
        (1, 2**63 - 1, 2**63 - 1),
        (0, 2**63 - 1, 2**63 - 1),
        (-(2**63), 2**63 - 1, -1),
    ],
)
def test_expiry_is_clamped(timestamp: int, ttl: int, expires: int) -> None:
    assert expiration_timestamp(timestamp, ttl) == expires
    assert not expired(timestamp, ttl, expires - 1)
    assert expired(timestamp, ttl, expires)
    assert newest_expired(ttl, expires) >= timestamp > newest_expired(ttl, expires - 1)


@each_kind
def test_the_longest_time_to_live_does_not_overflow(keyed: Keyed, at: At, kind: Kind) -> None:
    config = sb.StateTtlConfig(MAX_TIMESTAMP, cleanup_idle=True)
    state = keyed.get_state(kind.descriptor("s", STRING).enable_time_to_live(config))
    at(1_000)
    kind.write(state, "x")
    at(MAX_TIMESTAMP - 1)
    assert keyed.advance() == 0
    assert kind.read(state) == "x"
    at(MAX_TIMESTAMP, key=2)
    assert keyed.advance() == 1
    assert keyed.num_entries() == 0


@each_kind
@pytest.mark.parametrize("update", [OnWrite, OnRead], ids=lambda each: each.name)
def test_state_keeps_its_stamp_if_the_clock_goes_back(keyed: Keyed, at: At, kind: Kind, update: Any) -> None:
    """Reads and writes go by the earlier time. Expired state that is still stored is seen again."""
    state = state_of(keyed, kind, update_type=update, cleanup_in_background=False)
    at(1_000)
    kind.write(state, "later")
    at(0)
    assert kind.read(state) == "later"
    end = TTL if update is OnRead else 1_000 + TTL
    at(end - 1)
    assert state.exists()
    at(end)
    assert kind.read(state) is None
    at(0, key=2)
    kind.write(state, "earlier")
    at(TTL, key=2)
    assert not state.exists()
    at(TTL - 1, key=2)
    assert kind.read(state) == "earlier"


def test_the_default_is_returned_with_ttl_too(keyed: Keyed, at: At) -> None:
    state = keyed.get_value_state(with_ttl(sb.ValueStateDescriptor("s", int, default=9)))
    at(0)
    assert state.value() == 9
    state.update(1)
    at(TTL)
    assert state.value() == 9


def test_maps_expire_by_entry(keyed: Keyed, at: At) -> None:
    state = keyed.get_map_state(with_ttl(sb.MapStateDescriptor("s", str, int)))
    at(0)
    state.put_all({"a": 1, "b": None})
    at(50)
    state["c"] = 3
    at(TTL)
    assert state.get("a", 7) == 7
    assert "b" not in state
    with pytest.raises(KeyError):
        state["a"]
    assert list(state.items()) == [("c", 3)]
    assert not state.is_empty()
    at(TTL + 50)
    assert state.is_empty()
    assert not state.exists()
    assert list(keyed.keys("s")) == []
    assert list(state) == []
    assert keyed.num_entries("s") == 0


@pytest.mark.parametrize("cleanup", ["default", "often"])
def test_expiry_does_not_disturb_iterators(keyed: Keyed, at: At, cleanup: str) -> None:
    names = keyed.get_list_state(with_ttl(sb.ListStateDescriptor("list", int), **CLEANUPS[cleanup]))
    counts = keyed.get_map_state(with_ttl(sb.MapStateDescriptor("map", int, int), **CLEANUPS[cleanup]))
    for now in (0, 50):
        at(now)
        names.add_all([now, now + 1])
        counts.put_all({now: 1, now + 1: 2})
    at(TTL)
    elements, entries = iter(names), iter(counts.items())
    seen = [next(elements)], [next(entries)]
    assert 1 not in counts
    for key in (2, 1):
        at(TTL, key)
        names.get()
        counts.get(7)
    assert [*seen[0], *elements] == [50, 51]
    assert [*seen[1], *entries] == [(50, 1), (51, 2)]


def test_a_call_reads_the_clock_once(backend: sb.StateBackend) -> None:
    """Though a call goes by the times of its rows: checkpoints have what the clock said last."""

    class Running:
        calls = 0

        def now(self) -> int:
            self.calls += 1
            return self.calls

    clock = Running()
    with backend.create_keyed_backend(int, clock=clock) as running:
        state = running.get_value_state(with_ttl(sb.ValueStateDescriptor("s", int)))
        state.update_many([1, 2, 3], [1, 2, 3])
        assert clock.calls == 1
        assert state.get_many([1, 2, 3]).to_pylist() == [1, 2, 3]
        assert clock.calls == 2
        running.set_current_key(1)
        state.value()
        state.update(1)
        assert clock.calls == 3
        rows = with_ttl(sb.ValueStateDescriptor("rows", int), ttl_time_characteristic=Time.EventTime)
        running.begin(watermarks=(None, 5000))
        for times in ([4900, 5000], None):
            before = clock.calls
            running.get_value_state(rows).update_many([1, 2], [1, 2], times=times)
            assert clock.calls == before + 1


def test_event_time_needs_a_clock_that_is_advanced(backend: sb.StateBackend) -> None:
    descriptor = with_ttl(sb.ValueStateDescriptor("s", int), ttl_time_characteristic=Time.EventTime)
    with (
        backend.create_keyed_backend(int) as keyed,
        pytest.raises(sb.UsageError, match=r"event time.*'s'.*clock="),
    ):
        keyed.get_state(descriptor)
    with backend.create_keyed_backend(int, clock=ManualClock()) as keyed:
        keyed.get_state(descriptor)


@each_kind
@pytest.mark.parametrize("cleanup", ["often", "idle"])
def test_rollback_returns_what_cleanup_has_removed_and_cleanup_finds_it_again(
    keyed: Keyed, at: At, backend: sb.StateBackend, kind: Kind, cleanup: str
) -> None:
    if cleanup == "often" and not backend.cleans_up_incrementally:
        pytest.skip("the backend defines incremental cleanup as without effect")
    state = state_of(keyed, kind, **CLEANUPS[cleanup])
    for key in range(50):
        at(key, key)
        kind.write(state, str(key))

    def cleaned(now: int) -> int:
        at(now, key=99)
        keyed.advance()
        kind.read(state)
        return keyed.num_entries()

    for is_set_back in (False, True, False):
        mark = keyed.mark()
        assert cleaned(TTL + 24) == 25
        keyed.rollback(mark)
        keyed.release(mark)
        assert keyed.num_entries() == 50
        for key in range(50) if is_set_back else ():
            at(40, key)
            assert kind.read(state) == str(key)
    assert cleaned(TTL + 10) == 39
    assert cleaned(TTL + 24) == 25


@pytest.mark.parametrize("read", ["get", "contains", "items"])
def test_a_read_that_renews_does_not_give_away_what_a_mark_needs(keyed: Keyed, at: At, read: str) -> None:
    state = keyed.get_map_state(with_ttl(sb.MapStateDescriptor("m", int, PICKLE), update_type=OnRead))
    at(1_000)
    state.put(1, [1, 2])
    mark = keyed.mark()
    at(1_050)
    if read == "contains":
        assert 1 in state
    held = dict(state.items())[1] if read == "items" else state.get(1)
    held.append(99)
    state.put(1, held)
    keyed.rollback(mark)
    at(1_060)
    assert state.get(1) == [1, 2]


def is_incremental(cleanup: str, backend: sb.StateBackend) -> bool:
    return cleanup in ("default", "often", "slowly") and backend.cleans_up_incrementally


@each_kind
@pytest.mark.parametrize("visibility", [Never, Show], ids=lambda each: each.name)
@pytest.mark.parametrize("cleanup", CLEANUPS)
def test_cleanup_removes_all_that_has_expired_and_nothing_else(
    keyed: Keyed, at: At, backend: sb.StateBackend, kind: Kind, visibility: Any, cleanup: str
) -> None:
    config = sb.StateTtlConfig(TTL, state_visibility=visibility, **CLEANUPS[cleanup])
    state = keyed.get_state(kind.descriptor("s", STRING).enable_time_to_live(config))
    cleans_up = is_incremental(cleanup, backend)
    for key in range(60):
        at(key, key)
        keyed.set_current_namespace("n" if key % 3 else sb.VOID)
        kind.write(state, str(key))
    keyed.set_current_namespace(sb.VOID)
    at(TTL + 29, key=1_000)
    at_once = 30 if cleanup == "often" and cleans_up else 60
    assert keyed.num_entries("s") == at_once, "a record cleans up, or only an access"
    assert keyed.advance(budget=10_000) == (30 if cleanup == "idle" else 0)
    for _ in range(200):
        assert kind.read(state) is None
    assert keyed.num_entries("s") == (30 if cleans_up or cleanup == "idle" else 60)
    figures = keyed.metrics()["states"]["s"]
    assert figures["expired_by_cleanup"] == 60 - keyed.num_entries("s")
    assert figures["expired_on_read"] == 0
    assert not cleans_up or figures["oldest_timestamp"] == 30
    keyed.set_current_namespace("n")
    for key in (key for key in range(60) if key % 3):
        at(TTL + 29, key)
        found = kind.read(state)
        assert found == (str(key) if key >= 30 else None) or (visibility is Show and found == str(key))


@each_kind
@pytest.mark.parametrize("cleanup", ["default", "idle"])
def test_cleanup_misses_nothing_when_the_clock_is_set_back(
    keyed: Keyed, at: At, backend: sb.StateBackend, kind: Kind, cleanup: str
) -> None:
    state = state_of(keyed, kind, **CLEANUPS[cleanup])
    for key, now in ((1, 1_000), (2, 0), (3, 500)):
        at(now, key)
        kind.write(state, "x")
        keyed.advance()
    for now, left in ((500 + TTL, 1), (1_000 + TTL, 0)):
        at(now, key=4)
        keyed.advance()
        for _ in range(200):
            assert kind.read(state) is None
        assert keyed.num_entries() == (left if cleanup == "idle" or is_incremental(cleanup, backend) else 3)


@pytest.mark.parametrize("cleanup", ["often", "idle"])
def test_lists_and_maps_expire_in_parts_in_the_background(
    keyed: Keyed, at: At, backend: sb.StateBackend, cleanup: str
) -> None:
    if cleanup == "often" and not backend.cleans_up_incrementally:
        pytest.skip("the backend defines incremental cleanup as without effect")
    names = keyed.get_list_state(with_ttl(sb.ListStateDescriptor("list", str), **CLEANUPS[cleanup]))
    counts = keyed.get_map_state(with_ttl(sb.MapStateDescriptor("map", str, int), **CLEANUPS[cleanup]))
    for now in (0, 50):
        for key in range(20):
            at(now, key)
            names.add_all([f"a{now}", f"b{now}"])
            counts.put_all({f"a{now}": 1, f"b{now}": 2})
    at(TTL, key=99)
    removed = keyed.advance()
    names.get(), counts.get("x")
    assert removed == (20 + 40 if cleanup == "idle" else 0)
    assert keyed.metrics()["states"]["list"]["expired_by_cleanup"] == 20
    assert keyed.metrics()["states"]["map"]["expired_by_cleanup"] == 40
    assert keyed.num_entries() == 40
    for key in range(20):
        keyed.set_current_key(key)
        assert names.get() == ["a50", "b50"]
        assert dict(counts.items()) == {"a50": 1, "b50": 2}


def test_idle_state_leaves_memory_in_advance_within_its_budget(keyed: Keyed, at: At) -> None:
    idle = with_ttl(sb.MapStateDescriptor("idle", str, int), cleanup_idle=True)
    kept = with_ttl(sb.ValueStateDescriptor("kept", int))
    counts, value = keyed.get_map_state(idle), keyed.get_value_state(kept)
    for key in (1, 2, 3):
        at(key, key)
        counts["a"] = 1
        value.update(1)
    keyed.set_current_namespace("n")
    counts["z"] = 1
    keyed.set_current_namespace(sb.VOID)
    at(TTL + 2, key=9)
    assert keyed.advance() == 2
    assert keyed.num_entries("idle") == 2
    assert keyed.num_entries("kept") == 3
    at(TTL + 3, key=9)
    assert keyed.advance(budget=1) == 1
    assert keyed.advance(budget=1) == 1
    assert keyed.advance() == 0
    assert keyed.num_entries("idle") == 0
    assert keyed.current_key == 9


@pytest.mark.usefixtures("incremental_cleanup")
def test_cleanup_for_every_record_needs_no_access(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    for for_every_record, left in ((True, 0), (False, 40)):
        keyed = make_keyed(max_parallelism=4)
        state = state_of(keyed, KINDS[0], cleanup_incrementally=(5, for_every_record))
        for now in (0, TTL):
            clock.set(now)
            for key in range(40):
                keyed.set_current_key(key)
                if now == 0:
                    state.update("x")
        assert keyed.num_entries() == left


@pytest.mark.usefixtures("incremental_cleanup")
def test_a_step_of_cleanup_is_bounded(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    keyed = make_keyed(max_parallelism=1)
    state = state_of(keyed, KINDS[0], cleanup_incrementally=(5, False))
    clock.set(0)
    state.update_many(range(1_000), ["x"] * 1_000)
    clock.set(TTL)
    keyed.set_current_key(10_000)
    for _ in range(40):
        before = keyed.num_entries()
        state.value()
        assert 0 <= before - keyed.num_entries() <= 5
    assert keyed.num_entries() <= 1_000 - 100


@pytest.mark.usefixtures("incremental_cleanup")
def test_vectorised_calls_clean_up_for_each_of_their_rows(make_keyed: MakeKeyed, clock: ManualClock) -> None:
    keyed = make_keyed(max_parallelism=1)
    state = state_of(keyed, KINDS[0])
    clock.set(0)
    state.update_many(range(1_000), ["x"] * 1_000)
    clock.set(TTL)
    state.update_many([5_000, 5_001, 5_002, 5_003], ["y"] * 4)
    assert 1_000 - 20 + 4 <= keyed.num_entries() < 1_004
    for _ in range(4):
        state.get_many(range(10_000, 10_100))
    assert keyed.num_entries() == 4
