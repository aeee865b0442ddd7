"""What the programmes of time to live share: kinds of state that hold one text, and every combination of options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from statebackend.state import (
    AggregatingStateDescriptor,
    FoldingStateDescriptor,
    KeyedStateBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    ValueStateDescriptor,
)
from statebackend.state.ttl import StateTtlConfig

TTL = 100
OnWrite = StateTtlConfig.UpdateType.OnCreateAndWrite
OnRead = StateTtlConfig.UpdateType.OnReadAndWrite
Never = StateTtlConfig.StateVisibility.NeverReturnExpired
Show = StateTtlConfig.StateVisibility.ReturnExpiredIfNotCleanedUp

CLEANUPS: dict[str, dict[str, Any]] = {
    "default": {},
    "off": {"cleanup_in_background": False},
    "often": {"cleanup_incrementally": (1_000, True)},
    "slowly": {"cleanup_incrementally": (1, False)},
    "snapshot": {"cleanup_full_snapshot": True, "cleanup_in_background": False},
    "rocksdb": {"cleanup_in_rocksdb_compact_filter": (10,), "cleanup_in_background": False},
    "idle": {"cleanup_idle": True, "cleanup_in_background": False},
}


class Kind(NamedTuple):
    """How a state of one kind is made, written and read: always to hold one text, or nothing."""

    make: Callable[[], Any]
    write: Callable[[Any, str], None]
    read: Callable[[Any], Any]


def last_of(elements: list[str]) -> str | None:
    return elements[-1] if elements else None


KINDS = {
    "value": Kind(lambda: ValueStateDescriptor("s", str), lambda s, v: s.update(v), lambda s: s.value()),
    "list": Kind(
        lambda: ListStateDescriptor("s", str), lambda s, v: s.update([v]), lambda s: last_of(s.get())
    ),
    "iterated list": Kind(
        lambda: ListStateDescriptor("s", str), lambda s, v: s.update([v]), lambda s: last_of(list(s))
    ),
    "map": Kind(
        lambda: MapStateDescriptor("s", str, str),
        lambda s, v: s.put("k", v),
        lambda s: s.get("k"),
    ),
    "iterated map": Kind(
        lambda: MapStateDescriptor("s", str, str),
        lambda s, v: s.put_all({"k": v}),
        lambda s: last_of(list(s.values())),
    ),
    "reducing": Kind(
        lambda: ReducingStateDescriptor("s", "last", str), lambda s, v: s.add(v), lambda s: s.get()
    ),
    "aggregating": Kind(
        lambda: AggregatingStateDescriptor("s", "max", str), lambda s, v: s.add(v), lambda s: s.get()
    ),
    "folding": Kind(
        lambda: FoldingStateDescriptor("s", "", lambda old, new: new, str),
        lambda s, v: s.add(v),
        lambda s: s.get(),
    ),
}

combinations = pytest.mark.parametrize(
    ("kind", "update", "visibility", "cleanup"),
    [
        pytest.param(*each, id="-".join(getattr(part, "name", part) for part in each))
        for each in itertools.product(KINDS, (OnWrite, OnRead), (Never, Show), CLEANUPS)
    ],
)


def make_state(keyed: KeyedStateBackend, kind: str, **options: Any) -> Any:
    return keyed.get_state(KINDS[kind].make().enable_time_to_live(StateTtlConfig(TTL, **options)))


def incremental(cleanup: str) -> bool:
    return cleanup in ("default", "often", "slowly")
