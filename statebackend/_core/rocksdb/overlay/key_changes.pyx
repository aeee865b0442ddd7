"""Changed keys, and the change of each; without a Python object for a key.

What becomes of a key is a number: 1, it was written; 0, it was removed; below 0, it only grew: so many bytes were
appended to the earlier bytes. `followed` combines two changes, one after the other, come to. Of a map that was
cleared as a whole, its place without the last byte, which no row has for a key, is noted as `CLEARED`.

Threads. A thread that reads or writes many keys without the GIL says so: `is_busy`. Another thread that ends a mark, or
takes a snapshot, waits for it. A write is refused before it has changed anything (`Store.noted_in`).
"""

cimport cython
import numpy as np
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset
from posix.unistd cimport usleep

from statebackend._core.memory.platform cimport hash_bytes
from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.buffers cimport append, drop
from statebackend._core.rocksdb.overlay.key_order cimport RankedKey, put_ranked_in_order, rank

from statebackend.errors import overlapping_call

cdef enum:
    PATIENCE = 300_000                # times that 0.1 ms are waited for a thread that is inside
    SEED = 0x9E3D
    LEAST_SLOTS = 64
    MOST_KEYS = 0x7FFFFFFF

#: A map was cleared, with entries that compactions have dropped and that can no longer be found.
CLEARED = 2
#: The answer of `became_of` for an absent key.
NOT_NOTED = int(np.iinfo(np.int64).min)


cdef inline int64_t followed(int64_t before, int64_t after) noexcept nogil:
    """What has become of a key by one change and another."""
    if after >= 0:
        return after
    return before + after if before < 0 else 1


@cython.final
cdef class KeyChanges:
    """Keys, each with its change."""

    def __cinit__(self, bint is_busy=False):
        memset(&self.keys, 0, sizeof(self.keys))
        self.is_busy = is_busy

    def __dealloc__(self):
        free(self.entries)
        free(self.slots)
        drop(&self.keys)

    def __len__(self):
        return self.n

    cdef int go_in(self, KeyChanges other=None) except -1:
        """Keep other threads out of these keys, and of others, until `go_out`. Waits for a thread that is inside."""
        cdef int waited = 0
        while self.is_busy or other is not None and other.is_busy:
            if waited == PATIENCE:
                raise overlapping_call()
            with nogil:
                usleep(100)
            waited += 1
        self.is_busy = True
        if other is not None:
            other.is_busy = True
        return 0

    cdef void go_out(self, KeyChanges other=None) noexcept:
        self.is_busy = False
        if other is not None:
            other.is_busy = False

    cdef uint32_t *slot_of(self, const char *key, size_t n, uint32_t hash) noexcept nogil:
        """Where the number of a key is, or would be."""
        cdef size_t at = hash & (self.n_slots - 1)
        cdef Noted *entry
        while self.slots[at]:
            entry = &self.entries[self.slots[at] - 1]
            if entry.hash == hash and entry.size == n and (n == 0 or memcmp(self.keys.data + entry.at, key, n) == 0):
                break
            at = (at + 1) & (self.n_slots - 1)
        return &self.slots[at]

    cdef bint make_room(self, size_t more) noexcept nogil:
        """For so many more entries."""
        cdef size_t i, at, wanted = 4 * self.n_slots if self.n_slots else LEAST_SLOTS
        cdef size_t room = 2 * self.room + 16
        cdef Noted *grown
        cdef uint32_t *slots
        if self.n + more > self.room:
            room = room if room > self.n + more else self.n + more
            grown = <Noted *>realloc(self.entries, room * sizeof(Noted))
            if grown == NULL:
                return False
            self.entries, self.room = grown, room
        if 2 * (self.n + more) <= self.n_slots:
            return True
        while wanted < 2 * (self.n + more):
            wanted *= 2
        slots = <uint32_t *>calloc(wanted, sizeof(uint32_t))
        if slots == NULL:
            return False
        for i in range(self.n):
            at = self.entries[i].hash & (wanted - 1)
            while slots[at]:
                at = (at + 1) & (wanted - 1)
            slots[at] = <uint32_t>(i + 1)
        free(self.slots)
        self.slots, self.n_slots = slots, wanted
        return True

    cdef bint note(self, const char *key, size_t n, int64_t became) noexcept nogil:
        """Note what becomes of a key; False without memory: nothing has changed."""
        return self.note_hashed(key, n, hash_bytes(<const unsigned char *>key, n, SEED), became)

    cdef bint note_hashed(self, const char *key, size_t n, uint32_t hash, int64_t became) noexcept nogil:
        cdef uint32_t *slot
        cdef Noted *entry
        if not self.make_room(1):
            return False
        slot = self.slot_of(key, n, hash)
        if slot[0]:
            entry = &self.entries[slot[0] - 1]
            entry.became = followed(entry.became, became)
            return True
        if self.n == MOST_KEYS or not append(&self.keys, key, n):
            return False
        entry = &self.entries[self.n]
        entry.at, entry.became, entry.size, entry.hash = self.keys.size - n, became, <uint32_t>n, hash
        self.n = self.n + 1
        slot[0] = <uint32_t>self.n
        return True

    def add(self, bytes key not None, int64_t became):
        """Note what becomes of a key."""
        cdef bint is_done
        self.go_in()
        is_done = self.note(key, len(key), became)
        self.go_out()
        if not is_done:
            raise MemoryError

    def get(self, bytes key not None):
        (became,) = self.became_of(np.array([0, len(key)], np.int64), np.frombuffer(key, np.uint8))
        return None if became == NOT_NOTED else int(became)

    def became_of(self, const int64_t[::1] offsets not None, const uint8_t[::1] keys not None):
        """The changes of many keys; `NOT_NOTED` for keys without a note."""
        cdef Py_ssize_t i, n = check_rows(offsets, keys, "keys")
        cdef const char *start = start_of(keys)
        cdef uint32_t *slot
        cdef int64_t[::1] each
        made = np.full(n, NOT_NOTED, np.int64)
        each = made
        self.go_in()
        if self.n:
            with nogil:
                for i in range(n):
                    slot = self.slot_of(
                        start + offsets[i], offsets[i + 1] - offsets[i],
                        hash_bytes(<const unsigned char *>start + offsets[i], offsets[i + 1] - offsets[i], SEED))
                    if slot[0]:
                        each[i] = self.entries[slot[0] - 1].became
        self.go_out()
        return made

    def copy(self):
        """The same keys, apart from these."""
        cdef KeyChanges made = KeyChanges()
        made.follow(self)
        return made

    def follow(self, KeyChanges later not None):
        """Note what has changed after this. O(later); without memory, a part of it is noted."""
        cdef size_t i
        cdef bint is_done = True
        cdef Noted *entry
        self.go_in(later)
        with nogil:
            for i in range(later.n):
                entry = &later.entries[i]
                is_done = self.note_hashed(later.keys.data + entry.at, entry.size, entry.hash, entry.became)
                if not is_done:
                    break
        self.go_out(later)
        if not is_done:
            raise MemoryError

    def precede(self, KeyChanges earlier not None):
        """Note what had changed before this. O(earlier); without memory, a part of it is noted."""
        cdef size_t i
        cdef bint is_done = True
        cdef Noted *entry
        cdef uint32_t *slot
        self.go_in(earlier)
        with nogil:
            for i in range(earlier.n):
                entry = &earlier.entries[i]
                slot = NULL
                if self.n:
                    slot = self.slot_of(earlier.keys.data + entry.at, entry.size, entry.hash)
                if slot != NULL and slot[0]:
                    self.entries[slot[0] - 1].became = followed(entry.became, self.entries[slot[0] - 1].became)
                else:
                    is_done = self.note_hashed(earlier.keys.data + entry.at, entry.size, entry.hash, entry.became)
                    if not is_done:
                        break
        self.go_out(earlier)
        if not is_done:
            raise MemoryError

    def in_order(self):
        """The keys, ascending, as offsets and bytes, and the change of each."""
        cdef size_t i
        cdef Py_ssize_t at = 0
        cdef Noted *entry
        cdef RankedKey *ranked = NULL
        cdef int64_t[::1] end, became
        cdef uint8_t[::1] byte
        self.go_in()
        try:
            ranked = <RankedKey *>malloc((self.n or 1) * sizeof(RankedKey))
            if ranked == NULL:
                raise MemoryError
            ends, of_keys = np.zeros(self.n + 1, np.int64), np.empty(self.n, np.int64)
            data = np.empty(self.keys.size, np.uint8)
            end, became, byte = ends, of_keys, data
            with nogil:
                for i in range(self.n):
                    entry = &self.entries[i]
                    rank(&ranked[i], self.keys.data + entry.at, entry.size, i)
                put_ranked_in_order(ranked, self.n)
                for i in range(self.n):
                    if ranked[i].size:
                        memcpy(&byte[at], ranked[i].key, ranked[i].size)
                    at += ranked[i].size
                    end[i + 1] = at
                    became[i] = self.entries[ranked[i].row].became
            return (ends, data), of_keys
        finally:
            self.go_out()
            free(ranked)
