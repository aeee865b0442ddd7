"""The copy-on-write map in plain Python: the twin of `statebackend/_core/tables/cow_map.pyx`, for tests only.

It exists so that the algorithm can be read, stepped through and run without pointers. The tests of rules in
`tests/core` run on both; `test_twin_agrees.py` drives both with the same random histories and compares
answers, chains, versions and counters. Functions have the names and the order of steps of the compiled ones;
a rule that is changed there is changed here. Layout and versions are described in `cow_map.pxd`.

What differs: a slot is an `Entry` object, a page is a list, a payload is the tuple (timestamp, value), there
is always memory, an object has a version of its own (`Entry.value_version`), rehash counts as a modification,
and there are neither lanes nor threads of map states nor lists. `state_core.py` and `state_table.py` in this
folder are the twins of the modules of those names.
"""

from __future__ import annotations

MIN_TRANSFERRED_PER_INCREMENTAL_REHASH = 4
MAX_BUCKETS_PER_INCREMENTAL_REHASH = 32
SHORT_STRETCH = 32
SHORT_STRETCHES_FROM = 512
MAX_SPLIT = 16
MIN_ORDER, MAX_ORDER = 8, 21  # of the arena: runs are from 256 bytes to 2 MB
FREE_SLOT = 0xFFFFFFFF
FREE_BLOCK = 4
LAST_VERSION = 0xFFFFFF00
RECORD_WRITE, RECORD_INSERT, RECORD_REMOVE, RECORD_MOVED, RECORD_COPIED = 1, 2, 3, 4, 5
RETIRED_SLOT, RETIRED_RUN = 6, 7
SMALL_RUNS, SLOTS_PER_STEP, STEPS_OF_A_MOVE = 1024, 8, 4
SHRINK_NOT, SHRINK_NOTED, SHRINK_BEGUN = 0, 1, 2
UINT64 = (1 << 64) - 1


class Entry:
    """A slot. `value_version` is when the value was last written or copied: Flink's second version."""

    __slots__ = (
        "free_refs",
        "hash",
        "key",
        "namespace",
        "next",
        "payload",
        "run",
        "slot",
        "value_version",
        "version",
    )


class PageRef:
    __slots__ = ("ref", "version")

    def __init__(self):
        self.ref, self.version = None, 0


class BucketTable:
    """`capacity` 0: there is no table. A page is made when it is first needed."""

    def __init__(self, capacity=0):
        self.capacity, self.size = capacity, 0
        self.pages = [PageRef() for _ in range(max(capacity // CowMap.PAGE_BUCKETS, 1))] if capacity else []


class CowMap:
    """The entries of one key group."""

    PAGE_BUCKETS = 4096

    def __init__(self, table, group):
        self.table, self.group = table, group
        self.seen_version = table.core.highest_required_snapshot_version
        self.used, self.modifications, self.directories = 0, 0, []
        self.shrinking = SHRINK_NOT
        self.restart(table)

    def restart(self, table):
        self.runs, self.run_bytes, self.fresh, self.fresh_end = [], 0, 0, 0
        self.free_slot, self.free_in_block = None, 0
        self.slots, self.sparse_below = 0, 0
        self.n_old, self.old_used, self.old_bytes = 0, 0, 0
        self.primary, self.secondary, self.rehash_index = (
            BucketTable(table.initial_capacity),
            BucketTable(),
            0,
        )
        self.threshold = table.initial_capacity // 4 * 3


class Directory:
    """What the snapshots `low..high` see of one map."""

    def __init__(self, map, high):
        self.map, self.low, self.high = map, map.seen_version + 1, high
        self.size, self.rehash_index = map.primary.size + map.secondary.size, map.rehash_index
        self.tables = [(t.capacity, [page.ref for page in t.pages]) for t in (map.primary, map.secondary)]


class Log:
    """Records (op, map, slot, what belongs to it, until), newest last.

    `until` is the newest snapshot that may need what is here: the newest one when the log was begun.
    """

    def __init__(self, until=0):
        self.records, self.held, self.until = [], 0, until

    def add(self, op, map, slot, rest):
        self.records.append((op, map, slot, rest, self.until))

    def append(self, other):
        if other.records:
            self.until = other.until
        self.records += other.records
        self.held += other.held
        other.records, other.held = [], 0


class Segment:
    def __init__(self, version, until):
        self.version, self.log = version, Log(until)


class Journal:
    def __init__(self, table):
        self.table, self.segments, self.carried, self.dead = table, [], Log(), Log()


class Link:
    """What names an entry: a bucket of a page, or `next` of the entry before it."""

    def __init__(self, page=None, index=0, before=None):
        self.page, self.index, self.before = page, index, before

    @property
    def to(self):
        return self.page[self.index] if self.before is None else self.before.next

    @to.setter
    def to(self, entry):
        if self.before is None:
            self.page[self.index] = entry
        else:
            self.before.next = entry


# --- hashes ----------------------------------------------------------------------------------------


def fold(a, b):
    product = (a & UINT64) * (b & UINT64)
    return (product & UINT64) ^ (product >> 64)


def hash_int(key, ns, seed):
    h = fold((key & UINT64) ^ seed, 0x9E3779B97F4A7C15 + 2 * ns)
    return (h ^ (h >> 32)) & 0xFFFFFFFF


def hash_bytes(data, seed):
    h, whole = seed & UINT64, len(data) & ~7
    for at in range(0, whole, 8):
        h = fold(h ^ int.from_bytes(data[at : at + 8], "little"), 0x9E3779B97F4A7C15)
    if len(data) > whole:
        h = fold(h ^ int.from_bytes(data[whole:], "little"), 0xC2B2AE3D27D4EB4F)
    h = fold(h ^ len(data), 0xD6E8FEB86659FD93)
    return (h ^ (h >> 32)) & 0xFFFFFFFF


# --- slots -----------------------------------------------------------------------------------------


def add_run(table, map):
    order = max((max((map.run_bytes - map.old_bytes) >> 5, 4 * table.stride) - 1).bit_length(), MIN_ORDER)
    order = min(order, MAX_ORDER - 1)
    map.runs.append([None] * ((1 << order) // table.stride))
    map.run_bytes += 1 << order
    map.slots += len(map.runs[-1])
    map.fresh, map.fresh_end = 0, len(map.runs[-1])
    if map.n_old == 0 and map.shrinking == SHRINK_NOT:
        set_sparse_below(map)


def set_sparse_below(map):
    map.sparse_below = map.slots // 2 if map.run_bytes - map.old_bytes > SMALL_RUNS else 0


def note_sparse(table, map):
    """Leave it to `drain` to make a map smaller."""
    map.sparse_below, map.shrinking = 0, SHRINK_NOTED
    table.core.sparse.append(map)
    table.core.pending = True


def free_old_runs(table, map):
    """Give the old runs back: nobody uses a slot of theirs."""
    for number in range(map.n_old):
        release_run(table.core, number + 1)
    del map.runs[: map.n_old]
    map.run_bytes -= map.old_bytes
    map.n_old, map.old_used, map.old_bytes = 0, 0, 0
    if map.shrinking == SHRINK_NOT:
        set_sparse_below(map)


def slot_alloc(table, map):
    slot = map.free_slot
    if slot is not None:
        if map.free_in_block:
            map.free_in_block -= 1
            slot = slot.free_refs.pop()
        else:
            map.free_slot = slot.next
            if map.free_slot is not None:
                map.free_in_block = FREE_BLOCK
    else:
        if map.fresh == map.fresh_end:
            add_run(table, map)
        slot = map.runs[-1][map.fresh] = Entry()
        slot.slot, slot.run = table.core.next_slot_number(), map.runs[-1]
        map.fresh += 1
    map.used += 1
    return slot


def slot_free(table, map, slot):
    """Forget a slot that no chain, journal or snapshot names; the last one gives the map's memory back."""
    slot.payload, slot.key = None, None
    slot_return(table, map, slot)
    if map.used == 0:
        map_clear_storage(table, map)


def slot_return(table, map, slot):
    slot.version = FREE_SLOT
    if any(slot.run is run for run in map.runs[: map.n_old]):
        map.old_used -= 1
        if map.old_used == 0:
            free_old_runs(table, map)
    elif map.free_slot is not None and map.free_in_block < FREE_BLOCK:
        map.free_slot.free_refs.append(slot)
        map.free_in_block += 1
    else:
        slot.next, slot.free_refs = map.free_slot, []
        map.free_slot, map.free_in_block = slot, 0
    map.used -= 1
    if map.used < map.sparse_below:
        note_sparse(table, map)


def release_run(core, freed):
    """Free a run; past the first few of one operation, leave it to `drain`."""
    if freed > 8:
        core.garbage.add(RETIRED_RUN, None, None, FREE_SLOT)
        core.pending = True


def map_clear_storage(table, map):
    """Return an empty map to its beginning: no runs, no pages, smallest capacity."""
    core, freed = table.core, 0
    for _ in map.runs:
        freed += 1
        release_run(core, freed)
    for buckets in (map.primary, map.secondary):
        for page in buckets.pages:
            if page.ref is None:
                continue
            if page.version < core.highest_required_snapshot_version:
                push_page(core.newest.retired, page)
            else:
                freed += 1
                release_run(core, freed)
    map.restart(table)


# --- bucket pages ----------------------------------------------------------------------------------


def push_page(log, page):
    log.add(RETIRED_RUN, None, None, page.version)


def active_table(map, hash):
    return map.primary if hash & (map.primary.capacity - 1) >= map.rehash_index else map.secondary


def bucket(buckets, index):
    """The first entry of a bucket."""
    page = buckets.pages[index // CowMap.PAGE_BUCKETS].ref
    return page[index % CowMap.PAGE_BUCKETS] if page is not None else None


def chain_head(map, hash):
    buckets = active_table(map, hash)
    return bucket(buckets, hash & (buckets.capacity - 1))


def bucket_for_write(table, buckets, index):
    """A bucket that may be changed: its page exists and belongs to no snapshot."""
    core, page = table.core, buckets.pages[index // CowMap.PAGE_BUCKETS]
    if page.ref is None:
        page.ref = [None] * min(buckets.capacity, CowMap.PAGE_BUCKETS)
        page.version = core.state_version
    elif page.version < core.highest_required_snapshot_version:
        push_page(core.newest.retired, page)
        page.ref = list(page.ref)
        page.version = core.state_version
        table.copied_pages += 1
    return Link(page.ref, index % CowMap.PAGE_BUCKETS)


# --- logs that operations append to ----------------------------------------------------------------


def segment_for_writing(core, journal):
    """The log of the newest segment, begun now if a mark was opened since the last record."""
    if not journal.segments or journal.segments[-1].version < core.journal_version:
        journal.segments.append(Segment(core.journal_version, core.highest_required_snapshot_version))
    return journal.segments[-1].log


def record_log(table):
    """Where records of inserts, removals and moves go; None when nobody wants them."""
    if table.override is not None:
        return table.override
    return segment_for_writing(table.core, table.journal) if table.core.journal_version else None


def keep_payload(table, map, slot, op):
    log = record_log(table)
    log.held += table.holds_references
    log.add(op, map, slot, slot.payload)


def push_retired(log, map, slot):
    log.add(RETIRED_SLOT, map, slot, None)


def retire(table, map, slot, clone, log):
    """Hand over a slot that `clone` has replaced in the live map."""
    if log is not None:
        log.held += 1
        log.add(RECORD_MOVED, map, slot, clone)
    else:
        push_retired(table.core.newest.retired, map, slot)


# --- copy on write ---------------------------------------------------------------------------------


def unwritten_version(core):
    return core.journal_version - 1 if core.journal_version else core.state_version


def clone_entry(table, map, slot):
    """A copy that the live map owns alone, not linked anywhere yet; its value is still shared."""
    clone = slot_alloc(table, map)
    for name in ("next", "key", "namespace", "hash", "payload", "value_version"):
        setattr(clone, name, getattr(slot, name))
    clone.version = unwritten_version(table.core)
    table.copied_entries += 1
    return clone


def own_entry(table, map, slot, hash):
    """Flink's handleChainedEntryCopyOnWrite: clone what is old in the chain up to and with `slot`.

    Returns the slot that stands for `slot` in the live map from now on.
    """
    required, buckets = table.core.highest_required_snapshot_version, active_table(map, hash)
    link = bucket_for_write(table, buckets, hash & (buckets.capacity - 1))
    current = link.to
    while True:
        clone = current
        if current.version < required:
            log = record_log(table)
            clone = link.to = clone_entry(table, map, current)
            retire(table, map, current, clone, log)
        if current is slot:
            return clone
        link = Link(before=clone)
        current = link.to


def slot_for_write(table, map, slot, hash):
    """Make a live entry writable: cloned if a snapshot has it, journalled if a mark needs it."""
    core = table.core
    if slot.version < core.highest_required_snapshot_version:
        slot = own_entry(table, map, slot, hash)
    if slot.version < core.journal_version:
        keep_payload(table, map, slot, RECORD_WRITE)
    slot.version = slot.value_version = core.state_version
    return slot


def see_snapshots(core, map):
    """Give all snapshots since `seen_version` the map's page directory."""
    required = core.highest_required_snapshot_version
    if map.seen_version >= required:
        return
    if map.primary.size + map.secondary.size:
        directory = Directory(map, required)
        map.directories.insert(0, directory)
        core.newest.directories.append(directory)
    map.seen_version = required


# --- growing ---------------------------------------------------------------------------------------


def capacity_for(table, entries):
    """Buckets for that many entries."""
    capacity = table.initial_capacity
    while capacity // 4 * 3 < entries:
        capacity *= 2
    return capacity


def begin_rehash(map, capacity):
    map.secondary, map.rehash_index = BucketTable(capacity), 0
    map.threshold = capacity // 4 * 3


def finish_rehash(map):
    map.primary, map.secondary, map.rehash_index = map.secondary, BucketTable(), 0


def move_bucket(table, map, index):
    """Move one whole bucket to the secondary table; how many entries moved."""
    required, mask = table.core.highest_required_snapshot_version, map.secondary.capacity - 1
    chain, slot = [], bucket(map.primary, index)
    while slot is not None:
        chain.append(slot)
        slot = slot.next
    targets = [bucket_for_write(table, map.secondary, slot.hash & mask) for slot in chain]
    old = [slot for slot in chain if slot.version < required]
    log = record_log(table) if old else None
    clones = {slot: clone_entry(table, map, slot) for slot in old}
    for slot, target in zip(chain, targets, strict=True):
        live = clones.get(slot, slot)
        if live is not slot:
            retire(table, map, slot, live, log)
        live.next = target.to
        target.to = live
    map.primary.size -= len(chain)
    map.secondary.size += len(chain)
    return len(chain)


def give_page_back(table, page):
    """Free a page of the primary table that rehash has emptied, or leave it to the snapshots that see it."""
    if page.ref is not None and page.version < table.core.highest_required_snapshot_version:
        push_page(table.core.newest.retired, page)
    page.ref = None


def moves_stretches(core, map):
    secondary, primary = map.secondary.capacity, map.primary.capacity
    return core.newest is None and primary < secondary <= MAX_SPLIT * primary


def rehash_step(table, map):
    """Flink's incrementalRehash: move at least four entries, whole buckets only, past few empty buckets.

    A map with many buckets that no snapshot needs moves a stretch of them, because entries that move together wait for
    memory together.
    """
    transferred = scanned = 0
    while True:
        index = map.rehash_index
        if index and (index % CowMap.PAGE_BUCKETS == 0 or index == map.primary.capacity):
            give_page_back(table, map.primary.pages[(index - 1) // CowMap.PAGE_BUCKETS])
        if index == map.primary.capacity:
            finish_rehash(map)
            return
        if (
            transferred >= MIN_TRANSFERRED_PER_INCREMENTAL_REHASH
            or scanned >= MAX_BUCKETS_PER_INCREMENTAL_REHASH
        ):
            return
        n, moved = 1, 0
        if map.primary.capacity >= SHORT_STRETCHES_FROM and moves_stretches(table.core, map):
            page = CowMap.PAGE_BUCKETS
            n = min(SHORT_STRETCH, map.primary.capacity - index, page - index % page)
        for each in range(index, index + n):
            moved += move_bucket(table, map, each)
        map.rehash_index = index + n
        transferred += moved
        scanned += n
        table.moved_entries += moved


# --- shrinking -------------------------------------------------------------------------------------


def begin_shrinking(table, map):
    """Begin to move to fewer buckets, and to new runs, if it is worth while."""
    size = map.primary.size + map.secondary.size
    capacity = capacity_for(table, size + size // 3 + 1)
    map.shrinking = SHRINK_BEGUN
    if map.slots > 2 * map.used and map.run_bytes > SMALL_RUNS and map.n_old == 0:
        map.n_old, map.old_used, map.old_bytes = len(map.runs), map.used, map.run_bytes
        map.old_run = map.old_slot = 0
        map.fresh = map.fresh_end = map.slots = 0
        map.free_slot, map.free_in_block = None, 0
    if 4 * capacity <= map.primary.capacity:
        begin_rehash(map, capacity)


def relocate(table, map, slot):
    """Move a live entry to another slot. Its version stays, but where a snapshot has it."""
    is_shared = slot.version < table.core.highest_required_snapshot_version
    link = link_before(table, map, slot, slot.hash)
    log = record_log(table)
    moved = clone_entry(table, map, slot)
    table.copied_entries -= 1
    if not is_shared:
        moved.version = slot.version
    link.to = moved
    if log is not None or is_shared:
        retire(table, map, slot, moved, log)
    else:
        slot_return(table, map, slot)


def is_live(map, slot):
    found = chain_head(map, slot.hash)
    while found is not None and found is not slot:
        found = found.next
    return found is slot


def empty_old_runs(table, map):
    """Look at a few slots of the old runs, up to the first live entry, and move that; what it costs."""
    run = map.runs[map.old_run]
    for _ in range(SLOTS_PER_STEP):
        if map.old_slot == len(run):
            map.old_run, map.old_slot = map.old_run + 1, 0
            return 1
        slot = run[map.old_slot]
        map.old_slot += 1
        if slot is not None and slot.version != FREE_SLOT and is_live(map, slot):
            relocate(table, map, slot)
            return 1 + STEPS_OF_A_MOVE
    return 1


def shrink_maps(core, budget):
    """Make maps smaller, one after the other."""
    while budget > 0 and core.sparse:
        map = core.sparse[0]
        see_snapshots(core, map)
        if map.secondary.capacity:
            rehash_step(map.table, map)
            budget -= 1
        elif map.shrinking == SHRINK_NOTED:
            begin_shrinking(map.table, map)
            budget -= 1
        elif map.n_old and map.old_run < map.n_old:
            budget -= empty_old_runs(map.table, map)
        else:
            map.shrinking = SHRINK_NOT
            core.sparse.pop(0)
            if map.n_old == 0:
                set_sparse_below(map)
    return budget


# --- the operations --------------------------------------------------------------------------------


def before_operation(table, map):
    """What every operation on a map begins with: take its directory for new snapshots, move a few entries."""
    if map.seen_version < table.core.highest_required_snapshot_version:
        see_snapshots(table.core, map)
    if map.secondary.capacity:
        rehash_step(table, map)


def find(map, key, ns, hash):
    """The live entry of a key, None if there is none. Changes nothing."""
    slot = chain_head(map, hash)
    while slot is not None and not (slot.key == key and slot.namespace == ns):
        slot = slot.next
    return slot


def insert(table, map, key, ns, hash):
    """Add an entry for a key that is absent.

    As in Flink, the insert that makes the map double still goes into the old table.
    """
    core = table.core
    if map.secondary.capacity == 0 and map.primary.size > map.threshold:
        begin_rehash(map, 2 * map.primary.capacity)
    log, buckets = record_log(table), active_table(map, hash)
    link = bucket_for_write(table, buckets, hash & (buckets.capacity - 1))
    slot = slot_alloc(table, map)
    slot.version = slot.value_version = core.state_version
    slot.key, slot.namespace, slot.hash, slot.payload = key, ns, hash, None
    slot.next = link.to
    link.to = slot
    buckets.size += 1
    map.modifications += 1
    table.entries += 1
    if log is not None:
        log.add(RECORD_INSERT, map, slot, None)
    return slot


def link_before(table, map, slot, hash):
    """The link that names a live entry, made writable.

    The head of a bucket needs no clone; before a later entry, what is old in the chain is cloned.
    """
    buckets = active_table(map, hash)
    index = hash & (buckets.capacity - 1)
    current, previous = bucket(buckets, index), None
    while current is not slot:
        previous, current = current, current.next
    if previous is None:
        return bucket_for_write(table, buckets, index)
    if previous.version < table.core.highest_required_snapshot_version:
        previous = own_entry(table, map, previous, hash)
    return Link(before=previous)


def unlink_entry(table, map, link, slot, hash):
    link.to = slot.next
    active_table(map, hash).size -= 1
    map.modifications += 1
    table.entries -= 1


def remove(table, map, slot, hash):
    """Remove a live entry. A journal keeps the slot as it is, for rollback."""
    core = table.core
    shared = slot.version < core.highest_required_snapshot_version
    link, log = link_before(table, map, slot, hash), record_log(table)
    unlink_entry(table, map, link, slot, hash)
    if log is not None:
        log.held += 1
        log.add(RECORD_REMOVE, map, slot, None)
    elif shared:
        push_retired(core.newest.retired, map, slot)
    else:
        slot_free(table, map, slot)


# --- undo ------------------------------------------------------------------------------------------


def current_slot(slot, moved):
    while slot in moved:
        slot = moved[slot]
    return slot


def undo_write(table, map, slot, payload):
    if slot.version < table.core.highest_required_snapshot_version:
        slot = own_entry(table, map, slot, slot.hash)
    slot.payload = payload
    slot.version = table.core.state_version
    slot.value_version = 0  # a snapshot may have this very value


def undo_insert(table, map, slot):
    core, hash = table.core, slot.hash
    shared = slot.version < core.highest_required_snapshot_version
    unlink_entry(table, map, link_before(table, map, slot, hash), slot, hash)
    if shared:
        push_retired(core.newest.retired, map, slot)
    else:
        slot_free(table, map, slot)


def undo_remove(table, map, slot, carried, moved):
    core, back, buckets = table.core, slot, active_table(map, slot.hash)
    link = bucket_for_write(table, buckets, slot.hash & (buckets.capacity - 1))
    is_old = any(slot.run is run for run in map.runs[: map.n_old])
    if slot.version < core.highest_required_snapshot_version or is_old:
        back = clone_entry(table, map, slot)
        carried.add(RECORD_MOVED, map, slot, back)
        carried.held += 1
        moved[slot] = back
    back.next = link.to
    link.to = back
    back.version = core.state_version
    buckets.size += 1
    map.modifications += 1
    table.entries += 1


def absorb_moves(carried, known, moved):
    """Enter the moves appended to `carried` since it had `known` records."""
    for _, _, slot, clone, _ in carried.records[known:]:
        moved[slot] = clone


def undo_log(journal, log, carried, moved):
    """Reverse the records of `log`, newest first."""
    table = journal.table
    table.override = carried
    while log.records:
        op, map, slot, rest, _ = log.records.pop()
        known = len(carried.records)
        see_snapshots(table.core, map)
        if op == RECORD_MOVED:
            carried.add(op, map, slot, rest)
            carried.held += 1
        elif op == RECORD_REMOVE:
            undo_remove(table, map, slot, carried, moved)
        elif op == RECORD_INSERT:
            undo_insert(table, map, current_slot(slot, moved))
        else:
            undo_write(table, map, current_slot(slot, moved), rest)
        absorb_moves(carried, known, moved)
    log.held = 0
    table.override = None


# --- reclaiming ------------------------------------------------------------------------------------


def holder_of(core, until):
    """The newest live snapshot up to a version: newer ones never saw what is that old."""
    snapshot = core.newest
    while snapshot is not None and snapshot.version > until:
        snapshot = snapshot.older
    return snapshot


def let_go(holder, table, map, slot):
    """Free a slot that no journal names any more, or leave it to the snapshots that may see it."""
    if holder is not None and slot.version < holder.version:
        push_retired(holder.retired, map, slot)
    else:
        slot_free(table, map, slot)


def reclaim_log(journal, budget):
    """Take up to `budget` records that no rollback can reach, newest first; what is left of the budget."""
    log = journal.dead
    while budget > 0 and log.records:
        budget -= 1
        op, map, slot, _, until = log.records.pop()
        if op in (RECORD_REMOVE, RECORD_MOVED):
            let_go(holder_of(journal.table.core, until), journal.table, map, slot)
    if not log.records:
        log.held = 0
    return budget


def reclaim_garbage(core, budget):
    """Free what ended snapshots have left, or leave it to an older one that sees it, too."""
    while budget > 0 and core.garbage.records:
        budget -= 1
        op, map, slot, version, until = core.garbage.records.pop()
        holder = holder_of(core, until)
        if op == RETIRED_SLOT:
            let_go(holder, map.table, map, slot)
        elif holder is not None and version < holder.version:
            holder.retired.add(op, map, slot, version)
    return budget


def end_snapshot(core, snapshot):
    """Unlink a released snapshot. What it kept is looked at again: an older one may need it, too."""
    older, newer = snapshot.older, snapshot.newer
    if newer is not None:
        newer.older = older
    else:
        core.newest = older
    if older is not None:
        older.newer = newer
    else:
        core.oldest = newer
    core.dead_directories[:0] = snapshot.directories
    core.highest_required_snapshot_version = core.newest.version if core.newest is not None else 0
    core.garbage.append(snapshot.retired)


def free_directories(core, budget):
    while budget > 0 and core.dead_directories:
        budget -= 1
        directory = core.dead_directories.pop(0)
        holder = holder_of(core, directory.high)
        if holder is not None and holder.version >= directory.low:
            holder.directories.append(directory)
            continue
        directory.map.directories.remove(directory)
    return budget


def drain(core, budget):
    """End released snapshots and reclaim up to `budget` things that nobody needs."""
    snapshot, core.pending = core.oldest if core.any_released else None, False
    core.any_released = False
    while snapshot is not None:
        newer = snapshot.newer
        if snapshot.released:
            end_snapshot(core, snapshot)
        snapshot = newer
    budget = reclaim_garbage(core, free_directories(core, budget))
    for journal in core.journals:
        if budget > 0:
            budget = reclaim_log(journal, budget)
    budget = shrink_maps(core, budget)
    if budget <= 0 or core.dead_directories or core.garbage.records or core.sparse:
        core.pending = True


# --- the definition of the invariants --------------------------------------------------------------


def check_map(table, map):
    """Verify all invariants of `cow_map.pxd`. O(entries)."""
    core, keys, seen = table.core, set(), set()
    assert map.rehash_index <= map.primary.capacity
    assert map.primary.capacity > 0
    assert map.primary.capacity & (map.primary.capacity - 1) == 0
    assert map.secondary.capacity or map.rehash_index == 0
    for buckets in (map.primary, map.secondary):
        size = 0
        for index in range(buckets.capacity):
            slot = bucket(buckets, index)
            if buckets is map.primary and index < map.rehash_index:
                continue  # stale: the bucket has moved
            if buckets is map.secondary and index & (map.primary.capacity - 1) >= map.rehash_index:
                assert slot is None, "a bucket of the secondary table is ahead of the rehash"
            while slot is not None:
                assert slot not in seen, "a slot is in two chains"
                seen.add(slot)
                assert slot.version <= core.state_version, "a slot is free or comes from the future"
                assert active_table(map, slot.hash) is buckets
                assert slot.hash & (buckets.capacity - 1) == index
                assert (slot.key, slot.namespace) not in keys
                keys.add((slot.key, slot.namespace))
                size += 1
                slot = slot.next
        assert size == buckets.size
    free, slot = 0, map.free_slot
    while slot is not None:
        assert len(slot.free_refs) == (map.free_in_block if slot is map.free_slot else FREE_BLOCK)
        for each in (slot, *slot.free_refs):
            assert each.version == FREE_SLOT
            assert each not in seen, "a slot is free and in a chain"
            assert not any(each.run is run for run in map.runs[: map.n_old])
            seen.add(each)
            free += 1
        slot = slot.next
    old = [each for run in map.runs[: map.n_old] for each in run if each is not None]
    assert sum(each.version != FREE_SLOT for each in old) == map.old_used
    assert sum(len(run) for run in map.runs[map.n_old :]) == map.slots
    assert map.used - map.old_used + free == map.slots - (map.fresh_end - map.fresh)
    assert map.used >= len(keys)
    return len(keys)
