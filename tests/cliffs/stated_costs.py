"""What grows, and may: each with the sentence of the docs that says so."""

from __future__ import annotations

import math
from typing import NamedTuple


class Stated(NamedTuple):
    """A page of the docs, and the words in it that state a cost; how much dearer a call may become by it."""

    page: str
    sentence: str
    bound: float = math.inf


def _cells(kind: str, methods: str, *conditions: str) -> list[tuple[str, str, str]]:
    return [(kind, method, condition) for condition in conditions for method in methods.split()]


LENGTH, EXPIRED = "length of a collection", ("expired in front", "expired in between")

KEYS = Stated("state/enumeration.md", "| O(entries of the state) |")
KEYS_OF = Stated("state/enumeration.md", "| O(their entries) |")
ALL_KEYS = Stated("state/enumeration.md", "for each key that has the state. | O(entries) and the function |")
STILL_THERE = Stated("state/enumeration.md", "Expired entries that are not cleaned up yet add to the cost.")
CLEAR_KEY = Stated(
    "state/enumeration.md",
    "`clear_key` visits the namespaces of the backend or the entries of the key's group, whichever are fewer.",
)
LIST_GET = Stated("state/list.md", "| `get()` | The elements, in order, as a new list. | O(length) |")
LIST_ITER = Stated(
    "state/list.md", "| `for element in state` | The elements one by one, in order. | O(length) |"
)
LIST_MANY = Stated("state/list.md", "as an Arrow `ListArray`. | O(rows and elements) |")
MAP_ITER = Stated(
    "state/map.md",
    "| `keys()`, `values()`, `items()`, `for key in state` | Iterators, in insertion order; on "
    "[`rocksdb`](../run/backends.md#the-backend-rocksdb) in the order of encoded keys. | O(entries) |",
)
SAVEPOINT = Stated(
    "operate/savepoints.md", "It takes time in proportion to the entries and timers that are there."
)
RESTORE = Stated("operate/checkpoints.md", "A restore costs what the checkpoint holds, entries and timers.")
COUNTING = Stated("internals/map.md", "Each mark that was opened later adds to the time.")
SHRINKS = Stated("internals/map.md", "one move for each lost entry")
LIST_KEPT = Stated("state/list.md", "Costs include expired elements until they are removed.")
ACCESS = Stated("build/ttl.md", "a look at 5 neighbouring entries")
#: The small world has soon removed what has expired and rests; the large one is still at it.
ACCESS_TO_ONE = ACCESS._replace(bound=6.0)
IDLE = Stated("build/ttl.md", "in `advance`: the expired entries, and one look at everything per TTL")
PENDING = Stated(
    "build/timers.md", "| `pending_..._timers` | O(n log n) in the timers of the key and namespace |"
)
ROWS = Stated("build/timers.md", "| `rows`, `load` | O(n log n) in the timers |")
CLOSE = Stated("state/keyed-backend.md", "Drops everything. O(live state + removed state not yet reclaimed).")

#: By kind, method and what grows.
DOCUMENTED: dict[tuple[str, str, str], Stated] = {
    ("list", "get", LENGTH): LIST_GET,
    ("list", "__iter__", LENGTH): LIST_ITER,
    ("list", "get_many", LENGTH): LIST_MANY,
    **dict.fromkeys(_cells("list", "get __iter__ get_many", "expired in front"), LIST_KEPT),
    **dict.fromkeys(_cells("map", "keys values items", LENGTH), MAP_ITER),
    ("map", "__iter__", LENGTH): MAP_ITER,
    **dict.fromkeys(_cells("backend", "keys keys_and_namespaces", "keys"), KEYS),
    ("backend", "keys_and_namespaces", "namespaces"): KEYS,
    ("backend", "keys_of", "keys"): KEYS_OF,
    ("backend", "apply_to_all_keys", "keys"): ALL_KEYS,
    **dict.fromkeys(
        _cells("backend", "keys keys_of keys_and_namespaces apply_to_all_keys", *EXPIRED), STILL_THERE
    ),
    ("backend", "clear_key", "namespaces"): CLEAR_KEY,
    **dict.fromkeys(
        _cells("backend", "savepoint", "keys", "namespaces", "timers", LENGTH, *EXPIRED), SAVEPOINT
    ),
    **dict.fromkeys(_cells("backend", "advance", "namespaces", *EXPIRED), IDLE),
    # While anything is expired each access removes up to five entries: many, not few, are left for the last call.
    **dict.fromkeys(_cells("backend", "count_changes rollback clear_key", *EXPIRED), ACCESS),
    **dict.fromkeys(_cells("value", "value update clear", *EXPIRED), ACCESS_TO_ONE),
    **dict.fromkeys(_cells("reducing", "get add clear", *EXPIRED), ACCESS_TO_ONE),
    **dict.fromkeys(_cells("aggregating", "get add clear", *EXPIRED), ACCESS_TO_ONE),
    **dict.fromkeys(_cells("folding", "get add clear", *EXPIRED), ACCESS_TO_ONE),
    **dict.fromkeys(_cells("map", "get put put_all remove contains clear", *EXPIRED), ACCESS_TO_ONE),
    ("backend", "count_changes", "open marks"): COUNTING,
    # What is removed on the way pays for a map that becomes smaller.
    **dict.fromkeys(_cells("map", "keys", *EXPIRED), SHRINKS),
    **dict.fromkeys(
        _cells("factory", "create_keyed_backend", "keys", "namespaces", "timers", LENGTH, *EXPIRED), RESTORE
    ),
    ("timers", "pending_event_time_timers", "timers"): PENDING,
    ("timers", "rows", "timers"): ROWS,
    **dict.fromkeys(
        _cells(
            "backend",
            "close",
            *("open marks", "namespaces", "timers", "keys", LENGTH),
            *("gone", "marks gone", "snapshots gone", "namespaces gone", "timers deleted"),
        ),
        CLOSE,
    ),
}
