"""The twin of `state_table.pyx`, `core_probe.pyx` and `snapshot_view.pyx`; see `cow_map.py`.

Values are "long", "bytes" or "object".
"""

from __future__ import annotations

from statebackend.errors import ClosedError, SerializationTypeError, UsageError
from statebackend.keys import spark_hash
from twin.cow_map import (
    RECORD_COPIED,
    RECORD_MOVED,
    CowMap,
    Journal,
    before_operation,
    bucket,
    chain_head,
    check_map,
    find,
    hash_bytes,
    hash_int,
    insert,
    keep_payload,
    own_entry,
    remove,
    see_snapshots,
    slot_for_write,
)

VALUE_TYPES = {"long": int, "bytes": bytes, "object": object}


class StateTable:
    """One state: keys to values, a copy-on-write map per key group."""

    def __init__(
        self,
        owner,
        *,
        key="int",
        value="long",
        max_parallelism=128,
        namespaces=False,
        timestamps=False,
        initial_capacity=64,
        hash_mask=0xFFFFFFFF,
        copy_value=None,
    ):
        self.owner = self.core = owner
        self.key_type, self.value_type = int if key == "int" else bytes, VALUE_TYPES[value]
        self.max_parallelism, self.initial_capacity, self.hash_mask = (
            max_parallelism,
            initial_capacity,
            hash_mask,
        )
        self.has_timestamp, self.copy_value = bool(timestamps), copy_value
        self.holds_references = value != "long"
        before_value = 16 + 4 * (key == "bytes") + 4 * bool(namespaces)
        self.stride = -(-before_value // 8) * 8 + 8 * bool(timestamps) + 8
        self.maps, self.entries, self.override = {}, 0, None
        self.copied_entries = self.copied_pages = self.moved_entries = 0
        self.journal = Journal(self)
        owner.journals.insert(0, self.journal)
        owner.tables.append(self)

    # --- keys ---

    def split_key(self, key, ns):
        """The bucket hash and the key group of a key."""
        if type(key) is not self.key_type:
            raise SerializationTypeError(f"a key of this table is {self.key_type.__name__}")
        if self.key_type is int:
            if not -(2**63) <= key < 2**63:
                raise OverflowError("the key does not fit in 64 bits")
            return hash_int(key, ns, self.core.seed) & self.hash_mask, self.group_of(key)
        return hash_bytes(key, self.core.seed + ns) & self.hash_mask, self.group_of(key)

    def group_of(self, key):
        return spark_hash(key, "int64" if self.key_type is int else "bytes") % self.max_parallelism

    def check_value(self, value):
        if self.value_type is not object and type(value) is not self.value_type:
            raise SerializationTypeError(f"a value of this table is {self.value_type.__name__}")

    def locate(self, key, namespace):
        """Hash, map and slot of a key; does its share of a rehash."""
        hash, group = self.split_key(key, namespace)
        map = self.maps.get(group)
        if map is None:
            return hash, None, None
        before_operation(self, map)
        return hash, map, find(map, key, namespace, hash)

    # --- one key at a time ---

    def put(self, key, value, namespace=0, timestamp=0):
        self.owner.enter()
        self.check_value(value)
        hash, map, slot = self.locate(key, namespace)
        if map is None:
            map = self.maps[self.group_of(key)] = CowMap(self, self.group_of(key))
        if slot is not None:
            slot = slot_for_write(self, map, slot, hash)
        else:
            slot = insert(self, map, key, namespace, hash)
        slot.payload = (timestamp, value)

    def get(self, key, namespace=0):
        self.owner.enter()
        hash, map, slot = self.locate(key, namespace)
        return None if slot is None else self._unshare(map, slot, hash).payload[1]

    def _unshare(self, map, slot, hash):
        """Give the live map its own copy of an object that a snapshot or a mark still needs as it is."""
        required, journal_version = self.core.highest_required_snapshot_version, self.core.journal_version
        if self.copy_value is None or slot.value_version >= max(required, journal_version):
            return slot
        fresh = self.copy_value(slot.payload[1])
        if slot.version < required:
            see_snapshots(self.core, map)
            slot = own_entry(self, map, slot, hash)
        if slot.value_version < journal_version:
            keep_payload(self, map, slot, RECORD_COPIED)
        slot.payload = (slot.payload[0], fresh)
        slot.value_version = self.core.state_version
        return slot

    def contains(self, key, namespace=0):
        self.owner.enter()
        return self.locate(key, namespace)[2] is not None

    def timestamp(self, key, namespace=0):
        self.owner.enter()
        slot = self.locate(key, namespace)[2]
        return slot.payload[0] if slot is not None and self.has_timestamp else None

    def remove(self, key, namespace=0):
        self.owner.enter()
        hash, map, slot = self.locate(key, namespace)
        if slot is None:
            return False
        remove(self, map, slot, hash)
        return True

    # --- iteration and inspection ---

    def __len__(self):
        return self.entries

    def __iter__(self):
        """All live entries, in no order."""
        return iter(
            [StateEntry(slot) for group in sorted(self.maps) for slot in self.live_slots(self.maps[group])]
        )

    @staticmethod
    def live_slots(map):
        heads = [bucket(map.primary, index) for index in range(map.rehash_index, map.primary.capacity)]
        heads += [bucket(map.secondary, index) for index in range(map.secondary.capacity)]
        for slot in heads:
            while slot is not None:
                following = slot.next
                yield slot
                slot = following

    def chain(self, key, namespace=0):
        hash, group = self.split_key(key, namespace)
        slot = chain_head(self.maps[group], hash) if group in self.maps else None
        found = []
        while slot is not None:
            found.append(StateEntry(slot))
            slot = slot.next
        return found

    def rows_in(self, view):
        return view.items(self)

    def map_info(self, group):
        map = self.maps.get(group)
        if map is None:
            return None
        return {
            "size": map.primary.size + map.secondary.size,
            "primary_size": map.primary.size,
            "secondary_size": map.secondary.size,
            "primary_capacity": map.primary.capacity,
            "secondary_capacity": map.secondary.capacity,
            "rehash_index": map.rehash_index,
            "threshold": map.threshold,
            "used_slots": map.used,
            "run_bytes": map.run_bytes,
            "seen_version": map.seen_version,
            "directories": len(map.directories),
            "modifications": map.modifications,
        }

    def metrics(self):
        maps = self.maps.values()
        return {
            "entries": self.entries,
            "maps": len(maps),
            "used_slots": sum(map.used for map in maps),
            "entry_bytes": sum(map.run_bytes for map in maps),
            "buckets": sum(map.primary.capacity + map.secondary.capacity for map in maps),
            "rehashing_maps": sum(map.secondary.capacity != 0 for map in maps),
            "stride": self.stride,
            "copied_entries": self.copied_entries,
            "copied_pages": self.copied_pages,
            "rehashed_entries": self.moved_entries,
        }

    def _check(self):
        assert sum(check_map(self, map) for map in self.maps.values()) == self.entries

    def dirty(self, mark):
        """What was inserted, written or removed since `mark`: a set of (key, namespace)."""
        self.owner.require_open(mark)
        self.owner.enter()
        return {
            (slot.key, slot.namespace)
            for segment in self.journal.segments
            if segment.version >= mark.version
            for op, _, slot, _, _ in segment.log.records
            if op not in (RECORD_MOVED, RECORD_COPIED)
        }


class StateEntry:
    """One entry slot. Valid until the next change."""

    def __init__(self, entry):
        self._entry, self.slot = entry, entry.slot

    @property
    def key(self):
        return self._entry.key

    @property
    def namespace(self):
        return self._entry.namespace

    @property
    def value(self):
        return self._entry.payload[1]

    @property
    def version(self):
        return self._entry.version


class SnapshotView:
    """The tables as they were at one moment."""

    def __init__(self, owner):
        self.owner, self.snapshot = owner, owner.open_snapshot()

    def __del__(self):
        self.release()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.release()

    @property
    def version(self):
        return self.snapshot.version if self.snapshot is not None else 0

    def release(self):
        if self.snapshot is not None:
            self.snapshot.released, self.snapshot = True, None
            self.owner.any_released = self.owner.pending = True

    def directory(self, table, group):
        if self.snapshot is None:
            raise ClosedError("the snapshot was released")
        if table.owner is not self.owner:
            raise UsageError("the table belongs to another backend")
        map = table.maps.get(group)
        if map is None:
            return None
        if map.seen_version < self.snapshot.version:
            see_snapshots(self.owner, map)
        matching = (d for d in map.directories if d.low <= self.snapshot.version <= d.high)
        return next(matching, None)

    def group_sizes(self, table):
        found = (self.directory(table, group) for group in range(table.max_parallelism))
        return [directory.size if directory is not None else 0 for directory in found]

    def items(self, table):
        """All rows as {(key, namespace): value}."""
        found = {}
        for group in sorted(table.maps):
            directory = self.directory(table, group)
            if directory is None:
                continue
            before = len(found)
            for number, (capacity, pages) in enumerate(directory.tables):
                for index in range(directory.rehash_index if number == 0 else 0, capacity):
                    page = pages[index // CowMap.PAGE_BUCKETS]
                    slot = page[index % CowMap.PAGE_BUCKETS] if page is not None else None
                    while slot is not None:
                        found[slot.key, slot.namespace] = slot.payload[1]
                        slot = slot.next
            assert len(found) - before == directory.size
        return found
