"""The configuration of time to live, and its checks."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from statebackend.errors import UsageError
from statebackend.state.ttl import StateTtlConfig, expiration_timestamp, expired, newest_expired

UpdateType = StateTtlConfig.UpdateType
Visibility = StateTtlConfig.StateVisibility
Time = StateTtlConfig.TtlTimeCharacteristic


def test_defaults_are_flinks() -> None:
    config = StateTtlConfig.new_builder(timedelta(seconds=1)).build()
    assert config.ttl == 1000
    assert config.update_type is UpdateType.OnCreateAndWrite
    assert config.state_visibility is Visibility.NeverReturnExpired
    assert config.ttl_time_characteristic is Time.ProcessingTime
    assert config.incremental_cleanup == (5, False)
    assert config.rocksdb_cleanup == (1000, 30 * 24 * 3_600_000)
    assert not config.cleanup_full_snapshot
    assert not config.cleanup_idle
    assert config.cleanup_in_background


BUILT = [
    (lambda b: b.set_ttl(7), {"ttl": 7}),
    (lambda b: b.set_update_type(UpdateType.Disabled), {"update_type": UpdateType.Disabled}),
    (lambda b: b.update_ttl_on_create_and_write(), {"update_type": UpdateType.OnCreateAndWrite}),
    (lambda b: b.update_ttl_on_read_and_write(), {"update_type": UpdateType.OnReadAndWrite}),
    (lambda b: b.never_return_expired(), {"state_visibility": Visibility.NeverReturnExpired}),
    (
        lambda b: b.return_expired_if_not_cleaned_up(),
        {"state_visibility": Visibility.ReturnExpiredIfNotCleanedUp},
    ),
    (
        lambda b: b.set_state_visibility(Visibility.ReturnExpiredIfNotCleanedUp),
        {"state_visibility": Visibility.ReturnExpiredIfNotCleanedUp},
    ),
    (lambda b: b.use_processing_time(), {"ttl_time_characteristic": Time.ProcessingTime}),
    (
        lambda b: b.set_ttl_time_characteristic(Time.EventTime),
        {"ttl_time_characteristic": Time.EventTime},
    ),
    (lambda b: b.cleanup_full_snapshot(), {"cleanup_full_snapshot": True}),
    (lambda b: b.cleanup_incrementally(9, True), {"cleanup_incrementally": (9, True)}),
    (
        lambda b: b.cleanup_in_rocksdb_compact_filter(10),
        {"cleanup_in_rocksdb_compact_filter": (10,)},
    ),
    (
        lambda b: b.cleanup_in_rocksdb_compact_filter(10, periodic_compaction_time=timedelta(days=1)),
        {"cleanup_in_rocksdb_compact_filter": (10, 24 * 3_600_000)},
    ),
    (lambda b: b.disable_cleanup_in_background(), {"cleanup_in_background": False}),
]


@pytest.mark.parametrize(("build", "keywords"), BUILT)
def test_builder_and_keywords_agree(build: Any, keywords: dict[str, Any]) -> None:
    builder = StateTtlConfig.new_builder(5)
    assert build(builder) is builder
    config = StateTtlConfig(keywords.pop("ttl", 5), **keywords)
    assert builder.build() == config
    assert hash(builder.build()) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config


def test_what_is_configured_stays_without_background_cleanup() -> None:
    off = StateTtlConfig(5, cleanup_in_background=False)
    assert off.incremental_cleanup is None
    assert off.rocksdb_cleanup is None
    kept = StateTtlConfig(5, cleanup_in_background=False, cleanup_incrementally=(3, True))
    assert kept.incremental_cleanup == (3, True)
    assert kept.rocksdb_cleanup is None


@pytest.mark.parametrize("ttl", [1, np.int64(1), timedelta(milliseconds=1)])
def test_durations(ttl: Any) -> None:
    config = StateTtlConfig(ttl)
    assert config.ttl == 1
    assert type(config.ttl) is int


BAD_TTL = [0, -1, 1.0, "1 h", True, None, 2**63, timedelta(0), timedelta(-1), timedelta(microseconds=1)]


@pytest.mark.parametrize("ttl", BAD_TTL, ids=repr)
def test_a_bad_duration_is_refused_when_built(ttl: Any) -> None:
    for build in (
        lambda: StateTtlConfig(ttl),
        lambda: StateTtlConfig.new_builder(ttl).build(),
        lambda: StateTtlConfig.new_builder(1).set_ttl(ttl).build(),
    ):
        with pytest.raises(UsageError, match=r"Hint: write a datetime.timedelta"):
            build()


@pytest.mark.parametrize(
    ("keywords", "hint"),
    [
        ({"update_type": "OnReadAndWrite"}, "StateTtlConfig.UpdateType.OnReadAndWrite"),
        ({"update_type": 1}, "StateTtlConfig.UpdateType.Disabled"),
        ({"update_type": Visibility.NeverReturnExpired}, "UpdateType"),
        ({"state_visibility": True}, "StateTtlConfig.StateVisibility.NeverReturnExpired"),
        ({"ttl_time_characteristic": "EventTime"}, "StateTtlConfig.TtlTimeCharacteristic.EventTime"),
        ({"cleanup_full_snapshot": 1}, "True or False"),
        ({"cleanup_in_background": None}, "True or False"),
        ({"cleanup_idle": "yes"}, "True or False"),
        ({"cleanup_incrementally": 5}, r"\(5, False\)"),
        ({"cleanup_incrementally": (0, False)}, r"\(5, False\)"),
        ({"cleanup_incrementally": (1.5, False)}, r"\(5, False\)"),
        ({"cleanup_incrementally": (5, 1)}, "True or False"),
        ({"cleanup_in_rocksdb_compact_filter": 1000}, "query_time_after_num_entries"),
        ({"cleanup_in_rocksdb_compact_filter": (0,)}, "query_time_after_num_entries"),
        ({"cleanup_in_rocksdb_compact_filter": (1, -1)}, "timedelta"),
        ({"legacy_timestamp": 1.5}, "milliseconds"),
        ({"legacy_timestamp": datetime(2024, 1, 1)}, "time zone"),
    ],
    ids=repr,
)
def test_a_bad_option_is_refused_with_what_to_write(keywords: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=f"Hint: .*{hint}"):
        StateTtlConfig(1, **keywords)


def test_a_legacy_timestamp_may_be_a_datetime() -> None:
    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=timezone.utc)
    assert StateTtlConfig(1, legacy_timestamp=at).legacy_timestamp == 1000


def test_a_config_cannot_be_changed() -> None:
    config = StateTtlConfig(1)
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
