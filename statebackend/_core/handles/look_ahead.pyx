"""The later steps of looking ahead; `look_ahead.pxd` explains their purpose."""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, intptr_t, uint32_t, uintptr_t
from libc.string cimport memcpy, memset

from statebackend._core.memory.arena cimport address, ref_ahead
from statebackend._core.tables.cow_map cimport (
    Anchor, CoreKey, CowMap, ListChunk, ListHead, Table, blob_hash, chain_head, entry_at, find_int, hash_blob_key,
    hash_int_key, namespace_of, value_of)
from statebackend._core.memory.platform cimport prefetch
from statebackend._core.tables.state_table cimport StateTable

cdef extern from *:
    """
    #if SB_LOOKS_AHEAD && defined(__linux__)
    #include <sys/mman.h>
    #include <sys/uio.h>
    #include <unistd.h>
    /* Copies bytes if all of them can be read; 0 if not. The system does it, so that nothing can go wrong meanwhile. */
    static int sb_copied(uintptr_t from, void *to, size_t n) {
        struct iovec there = {(void *)from, n}, here = {to, n};
        return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == (ssize_t)n;
    }
    /* Whether the system does so. */
    static int sb_copies(void) {
        long size = sysconf(_SC_PAGESIZE);
        int64_t from = 7, to = 0;
        void *page = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int does;
        if (page == MAP_FAILED) return 0;
        does = sb_copied((uintptr_t)&from, &to, 8) && to == 7 && !sb_copied((uintptr_t)page, &to, 8);
        munmap(page, size);
        return does;
    }
    #else
    static int sb_copied(uintptr_t from, void *to, size_t n) { (void)from; (void)to; (void)n; return 0; }
    static int sb_copies(void) { return 0; }
    #endif
    """
    bint copied "sb_copied"(uintptr_t source, void *to, size_t n) noexcept nogil
    bint copies "sb_copies"() noexcept nogil

#: Whether keys on the next page of memory are guessed, too.
cdef bint looks_beyond = copies()


cdef bint peek_beyond(LookAhead *ahead, Guess *guess, uintptr_t at) noexcept nogil:
    """Read the key at an address that is not, or not wholly, on the page of the current one; False if there is none.

    The keys that probably follow it on that page are read with it, for the turns to come.
    """
    cdef char page[PAGE_OF_MEMORY + 64]
    cdef uintptr_t low = at, high = at + PEEKED
    cdef intptr_t stride = ahead.stride
    cdef Guess *each
    cdef int i
    if guess.at == at:                   # it was read with one before
        return True
    guess.at = 0
    if not looks_beyond or stride * BUCKETS_AHEAD > PAGE_OF_MEMORY or stride * BUCKETS_AHEAD < -PAGE_OF_MEMORY:
        return False
    if stride < 0:
        low = max(at + (BUCKETS_AHEAD - 1) * stride, at - at % PAGE_OF_MEMORY)
    else:
        high = min(high + (BUCKETS_AHEAD - 1) * stride, (high - 1) - (high - 1) % PAGE_OF_MEMORY + PAGE_OF_MEMORY)
    if not copied(low, page, high - low):
        return False
    for i in range(BUCKETS_AHEAD):
        if at < low or at + PEEKED > high:
            break
        each = &ahead.guesses[(ahead.turn + i) & (GUESSES - 1)]
        each.at = 0
        if not peek_int(<uintptr_t>page + (at - low), &each.number):
            break
        each.at = at
        at += stride
    return guess.at != 0


cdef void note_other_map_key(Visit *visit, Table *entries, const CoreKey *key, uint32_t turn) noexcept nogil:
    """Note a map key that differs from the last one: it takes the place of the one that has not come for longest."""
    cdef MapKey *noted
    cdef uint32_t i, oldest = 0
    if visit.entries != entries:
        visit.entries = entries
        memset(visit.map_keys, 0, sizeof(visit.map_keys))
    if entries.layout.key_is_blob and key.length > MAP_KEY_BYTES:
        return
    for i in range(MAP_KEYS):
        noted = &visit.map_keys[i]
        if is_map_key(noted, entries, key):
            noted.comes_again |= noted.turn != turn
            noted.turn = turn
            visit.last_map_key = i
            return
        if turn - noted.turn > turn - visit.map_keys[oldest].turn:
            oldest = i
    noted = &visit.map_keys[oldest]
    noted.number, noted.turn, noted.comes_again = key.number, turn, False
    if entries.layout.key_is_blob:
        noted.number = <int64_t>key.length
        memcpy(noted.bytes, key.data, key.length)
    visit.last_map_key = oldest


cdef void follow_values(LookAhead *ahead, uint32_t namespace) noexcept nogil:
    """Prefetch the data behind entries that have arrived."""
    cdef Guess *far = guess_of(ahead, CHAINS_AHEAD)
    cdef Guess *near = guess_of(ahead, VALUES_AHEAD)
    cdef Guess *nearer = guess_of(ahead, PARTS_AHEAD)
    cdef Guess *nearest = guess_of(ahead, RESTS_AHEAD)
    cdef uint32_t i
    cdef Visit *visit
    for i in range(ahead.n_visits):
        visit = &ahead.visits[i]
        if visit.table.layout.key_is_blob:
            if far != NULL:
                ask_for_key(visit.table, far.group, far.hash, far.number)
            if near != NULL:
                ask_for_second_key(visit.table, near)
        elif visit.reach != REACH_ENTRY and far != NULL:
            ask_for_second(visit.table, far.group, far.hash, far.number, namespace)
        if visit.reach == REACH_ENTRY:
            continue
        if near != NULL:
            follow_value(visit, near, namespace, ahead.turn + VALUES_AHEAD)
        if visit.reach == REACH_BLOB:
            continue
        if nearer != NULL:
            follow_part(visit, nearer, namespace, ahead.turn + PARTS_AHEAD)
        if nearest != NULL:
            follow_rest(visit, nearest, namespace, ahead.turn + RESTS_AHEAD)


cdef uint32_t find_hash(Table *table, CowMap *map, uint32_t namespace, uint32_t hash) noexcept nogil:
    """The first entry of a byte key with this hash, most probably the one; its bytes may not have arrived. 0: none."""
    cdef uint32_t slot = chain_head(table.core, map, hash)
    while slot and (blob_hash(entry_at(table.core, slot))[0] != hash
                    or namespace_of(table, entry_at(table.core, slot)) != namespace):
        slot = entry_at(table.core, slot).next
    return slot


cdef char *found_value(Visit *visit, Guess *guess, uint32_t namespace) noexcept nogil:
    cdef CowMap *map = visit.table.maps[guess.group - visit.table.first_group]
    cdef uint32_t slot = 0, hash = guess.hash & visit.table.hash_mask
    if map != NULL:
        if visit.table.layout.key_is_blob:
            slot = find_hash(visit.table, map, namespace, hash)
        else:
            slot = find_int(visit.table, map, guess.number, namespace, hash)
    return value_of(visit.table, entry_at(visit.table.core, slot)) if slot else NULL


cdef inline bint is_expected(MapKey *key, uint32_t turn) noexcept nogil:
    """Return True if a map key has come more than once, and lately."""
    return key.comes_again and turn - key.turn < MAP_KEY_TURNS


cdef void expect_entries(Visit *visit, PartGuess *part, uint32_t turn) noexcept nogil:
    """Hash the map keys that are probably looked up in a turn."""
    cdef Table *entries = visit.entries
    cdef MapKey *key
    cdef uint32_t i
    part.n = 0
    if part.turn == turn and not entries.layout.key_is_blob:
        part.numbers[0], part.hashes[0], part.n = part.number, hash_int_key(entries, part.number, part.anchor), 1
        return
    for i in range(MAP_KEYS):
        key = &visit.map_keys[i]
        if is_expected(key, turn):
            part.numbers[part.n] = key.number
            if entries.layout.key_is_blob:
                part.hashes[part.n] = hash_blob_key(entries, key.bytes, key.number, part.anchor)
            else:
                part.hashes[part.n] = hash_int_key(entries, key.number, part.anchor)
            part.n += 1


cdef void follow_value(Visit *visit, Guess *guess, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value = found_value(visit, guess, namespace)
    cdef PartGuess *part
    cdef uint32_t anchor, i
    if visit.reach == REACH_MAP_ENTRY:
        if value != NULL:
            anchor = (<uint32_t *>value)[0]
        else:                            # the key will be new, and those before it are taken to be
            anchor = ref_ahead(visit.table.core.blobs, sizeof(Anchor), VALUES_AHEAD)
        if anchor:
            part = &visit.parts[turn & (PART_GUESSES - 1)]
            part.anchor, part.hash_turn = anchor, turn
            expect_entries(visit, part, turn)
            for i in range(part.n):
                ask_for_bucket(visit.entries, guess.group, part.hashes[i])
    elif value == NULL:
        return
    elif visit.reach == REACH_BLOB:
        prefetch((<void **>value)[0])
    elif visit.reach == REACH_LIST:
        prefetch((<ListHead *>value).tail)
        if (<ListHead *>value).tail_used < (<ListHead *>value).length:
            visit.parts[turn & (PART_GUESSES - 1)].hash_turn = turn      # there are chunks before it
    else:
        prefetch(address(visit.table.core.arena, (<uint32_t *>value)[0]))


cdef void follow_part(Visit *visit, Guess *guess, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value
    cdef ListChunk *chunk
    cdef uint32_t first, i
    cdef PartGuess *part = &visit.parts[turn & (PART_GUESSES - 1)]
    if visit.reach == REACH_MAP_ENTRY:
        for i in range(part.n if part.hash_turn == turn else 0):
            ask_for_entry(visit.entries, guess.group, part.hashes[i])
        return
    if visit.reach == REACH_LIST and part.hash_turn != turn:
        return
    value = found_value(visit, guess, namespace)
    if value == NULL:
        return
    if visit.reach == REACH_LIST:
        chunk = (<ListHead *>value).tail
        if chunk != NULL:
            prefetch(chunk.prev)
        return
    first = (<Anchor *>address(visit.table.core.arena, (<uint32_t *>value)[0])).first
    if first:
        prefetch(entry_at(visit.table.core, first))


cdef void follow_rest(Visit *visit, Guess *guess, uint32_t namespace, uint32_t turn) noexcept nogil:
    cdef char *value
    cdef ListChunk *chunk
    cdef uint32_t i
    cdef PartGuess *part = &visit.parts[turn & (PART_GUESSES - 1)]
    if visit.reach == REACH_MAP_ENTRY:
        for i in range(part.n if part.hash_turn == turn else 0):
            if visit.entries.layout.key_is_blob:
                ask_for_key(visit.entries, guess.group, part.hashes[i], part.numbers[i])
            else:
                ask_for_second(visit.entries, guess.group, part.hashes[i], part.numbers[i], part.anchor)
    elif visit.reach == REACH_LIST and part.hash_turn == turn:
        value = found_value(visit, guess, namespace)
        if value != NULL:
            chunk = (<ListHead *>value).tail
            if chunk != NULL and chunk.prev != NULL:
                prefetch(chunk.prev.prev)


def looks_ahead():
    """Return True for a build that guesses the next keys; see `look_ahead.pxd` for those that do not."""
    return bool(LOOKS_AHEAD)


def _peeked_bytes():
    """How many bytes of an object looking ahead may read. For tests."""
    return PEEKED


def _number_at(something):
    """The number that looking ahead sees in an object, or None. For tests.

    >>> _number_at(-5), _number_at("-5")
    (-5, None)
    """
    cdef int64_t number
    return number if peek_int(<uintptr_t><PyObject *>something, &number) else None


def _number_ahead(key_at, stride):
    """The number that looking ahead sees from a key at an address, at this distance from the one before. For tests."""
    return _numbers_ahead(key_at, stride, 1)[0]


def _numbers_ahead(key_at, stride, int turns):
    """The numbers that looking ahead sees while so many keys are set, the first of them at an address. For tests."""
    cdef LookAhead ahead
    cdef Guess *guess
    memset(&ahead, 0, sizeof(LookAhead))
    ahead.key_at = key_at
    ahead.stride = stride
    seen = []
    for _ in range(turns):
        ahead.turn += 1
        guess = &ahead.guesses[ahead.turn & (GUESSES - 1)]
        seen.append(guess.number if peek(&ahead, guess) else None)
        ahead.key_at += ahead.stride
    return seen


def _map_key_ahead(uintptr_t last_at, intptr_t stride):
    """The map key that looking ahead sees from one at an address, at this distance from those before. For tests."""
    cdef LookAhead ahead
    cdef PartGuess *part = &ahead.visits[0].parts[VALUES_AHEAD + 1]
    cdef int i
    memset(&ahead, 0, sizeof(LookAhead))
    for i in range(3):
        note_part(&ahead, &ahead.visits[0], last_at - (2 - i) * stride)
    return part.number if part.turn == VALUES_AHEAD + 1 else None


def _map_keys_expected(StateTable entries not None, looked_up):
    """The map keys that are expected after these, pairs of a turn and a map key, one turn later. For tests.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> entries = StateTable(StateCore(), key="bytes", value="long")
    >>> _map_keys_expected(entries, [(1, b"red"), (2, b"blue"), (3, b"red")])
    [b'red']
    """
    cdef Visit visit
    cdef CoreKey at
    cdef uint32_t turn = 0, i
    cdef list found = []
    memset(&visit, 0, sizeof(Visit))
    memset(&at, 0, sizeof(CoreKey))
    for turn, map_key in looked_up:
        if entries.table.layout.key_is_blob:
            at.data, at.length = <const char *><bytes>map_key, len(map_key)
        else:
            at.number = map_key
        note_map_entry(&visit, entries.table, &at, turn)
    for i in range(MAP_KEYS):
        if not is_expected(&visit.map_keys[i], turn + 1):
            continue
        if entries.table.layout.key_is_blob:
            found.append(visit.map_keys[i].bytes[:visit.map_keys[i].number])
        else:
            found.append(visit.map_keys[i].number)
    return sorted(found)


def _in_runs(addresses):
    """Whether each of the keys at these addresses belongs to a run, so that what follows is guessed. For tests.

    >>> _in_runs([1000, 1048, 1096, 1144, 5000, 1192])
    [False, False, True, True, False, True]
    """
    cdef LookAhead ahead
    cdef uintptr_t at
    memset(&ahead, 0, sizeof(LookAhead))
    found = []
    for at in addresses:
        found.append(bool(goes_on(&ahead, at) or begins_run(&ahead, at)))
    return found
