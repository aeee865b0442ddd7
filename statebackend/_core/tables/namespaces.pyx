"""Namespaces by number: entries carry 4 bytes for any namespace.

Number 0 is VOID, the empty name. A number lives while entries carry it, in any state of the backend, in journals and
snapshots too. Each new namespace looks at a few numbers, in turn, and frees those that nothing carries. The lowest free
number is used first, so the highest ones become free and are given back. So past windows leave nothing behind, and no
call costs O(namespaces): the map of names to numbers consists of many small dicts, because a dict grows at once.
"""

import numpy as np

cimport cython
from cpython.object cimport PyObject_Hash
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from statebackend._core.memory.arena cimport Budget, raw_alloc, raw_free, raw_shrink
from statebackend._core.tables.cow_map cimport wait_for_others
from statebackend._core.memory.platform cimport unlikely

from statebackend.errors import ClosedError, UsageError

cdef extern from *:
    int lowest_bit "__builtin_ctzll"(uint64_t word) nogil

cdef enum:
    FIRST_CAPACITY = 64                  # a whole word of bits
    AT_LEAST = 1024                      # so many numbers are not looked at
    LOOKS = 8                            # for each new namespace
    SHARDS = 256
    SHARD_AT_LEAST = 64                  # smaller dicts are not made again
    NO_NUMBER = 0xFFFFFFFF


cdef inline uint64_t refs_size(uint32_t capacity) noexcept:
    return capacity * sizeof(int64_t)


cdef inline uint64_t bits_size(uint32_t capacity) noexcept:
    return (capacity >> 6) * sizeof(uint64_t)


cdef inline uint64_t words_size(uint32_t capacity) noexcept:
    return ((capacity >> 12) + 1) * sizeof(uint64_t)


@cython.final
cdef class NamespaceTable:
    """Numbers for the namespaces of one backend; made by StateCore.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> core = StateCore()
    >>> namespaces = core.namespaces
    >>> namespaces.number(b""), namespaces.number(b"window"), namespaces.name(1)
    (0, 1, b'window')
    """

    def __init__(self):
        raise UsageError("a NamespaceTable comes with a StateCore")

    def number(self, bytes name not None):
        """The number of an encoded namespace, assigned now if it is new. O(1) expected.

        It is valid until the next call of `number`, and as long as entries carry it or `pin` holds it.
        """
        return self.intern(name)

    def find(self, bytes name not None):
        """The number of an encoded namespace, or None if it has none."""
        return self.number_of(name)

    def name(self, uint32_t number):
        """The encoded namespace of a number; KeyError if the number is free."""
        if number >= len(self.names) or self.names[number] is None:
            raise KeyError(number)
        return self.names[number]

    def pin(self, uint32_t number, int change):
        """Hold a number (+1), or release it (-1), independently of entries: for the current namespace."""
        self.usable()
        self.name(number)
        self.core.namespace_refs[number] += change

    def hold_many(self, list names not None, bint assigns):
        """The numbers of encoded namespaces, as an array of uint32, held until `let_go_many` gets it. O(names).

        With `assigns`, new names get numbers; without, those that have none give a number that nothing carries.
        """
        cdef Py_ssize_t i
        cdef uint32_t number
        held = np.full(len(names), <uint32_t>NO_NUMBER, dtype=np.uint32)
        cdef uint32_t[::1] numbers = held
        self.usable()
        try:
            for i in range(numbers.shape[0]):
                if type(names[i]) is not bytes:
                    raise TypeError(f"the name of a namespace is bytes, not a {type(names[i]).__name__}")
                if assigns:
                    number = self.intern(names[i])
                else:
                    found = self.number_of(names[i])
                    if found is None:
                        continue
                    number = found
                numbers[i] = number
                self.core.namespace_refs[number] += 1
        except BaseException:
            self.let_go_many(held)
            raise
        return held

    def let_go_many(self, const uint32_t[::1] numbers not None):
        """Release what `hold_many` has given. O(names)."""
        cdef Py_ssize_t i
        if self.core == NULL:            # the backend is gone, and its counts with it
            return
        self.usable()
        for i in range(numbers.shape[0]):
            if numbers[i] != <uint32_t>NO_NUMBER:
                self.core.namespace_refs[numbers[i]] -= 1

    def _sizes(self):
        """Numbers returned, room for counts, and the most names that the dicts have had since they were made."""
        return len(self.names), self.core.namespace_capacity, sum(self.largest)

    def _check(self):
        """Verify that names and numbers agree. O(namespaces)."""
        cdef uint32_t number
        cdef Py_ssize_t used = 0
        assert len(self.names) <= self.core.namespace_capacity, "more numbers than counts"
        for number in range(self.core.namespace_capacity):
            is_free = number < <uint32_t>len(self.names) and self.names[number] is None
            assert is_free == bool(self.free_numbers[number >> 6] >> (number & 63) & 1), f"{number}: is it free?"
            assert bool(self.free_numbers[number >> 6]) == bool(self.free_words[number >> 12] >> (number >> 6 & 63) & 1)
            assert self.free_words[number >> 12] == 0 or self.lowest <= number >> 12, "a free number is overlooked"
            if number < <uint32_t>len(self.names) and not is_free:
                used += 1
                assert self.number_of(self.names[number]) == number, f"{number}: its name is that of another number"
        assert used == self.used == sum([len(shard or ()) for shard in self.shards]), f"{self.used} numbers"

    def __len__(self):
        return self.used

    cdef int usable(self) except -1:
        if self.core == NULL:
            raise ClosedError("the backend of these namespaces is gone")
        if unlikely(self.core.busy):
            wait_for_others(self.core)
        return 0

    cdef object number_of(self, bytes name):
        """The number of a name, or None."""
        cdef dict shard = self.shards[PyObject_Hash(name) & (SHARDS - 1)]
        return None if shard is None else shard.get(name)

    cdef dict shard_for(self, bytes name):
        """The dict for a name. Making it may run finalisers, which may add names."""
        cdef Py_ssize_t which = PyObject_Hash(name) & (SHARDS - 1)
        cdef dict made
        if self.shards[which] is None:
            made = {}
            if self.shards[which] is None:
                self.shards[which] = made
                self.largest[which] = 0
        return self.shards[which]

    cdef uint32_t intern(self, bytes name) except? 0xFFFFFFFF:
        cdef dict shard
        cdef uint32_t number
        cdef Py_ssize_t which
        self.usable()
        found = self.number_of(name)
        if found is not None:
            return found
        if self.used >= AT_LEAST:
            self.look_at_some()
        shard = self.shard_for(name)
        found = shard.get(name)
        if found is not None:            # a finaliser was quicker
            return found
        number = self.lowest_free()
        if number == <uint32_t>NO_NUMBER:
            number = <uint32_t>len(self.names)
            if number >= self.core.namespace_capacity:
                self.grow(2 * self.core.namespace_capacity)
            self.names.append(None)
            self.mark_free(number)
        shard[name] = number
        self.names[number] = name
        self.mark_used(number)
        self.used += 1
        self.core.namespace_refs[number] = 0
        which = PyObject_Hash(name) & (SHARDS - 1)
        if len(shard) > <Py_ssize_t>self.largest[which]:
            self.largest[which] = len(shard)
        return number

    cdef int look_at_some(self) except -1:
        """Free the numbers that nothing carries, of a few; give back free ones at the end. O(1) expected."""
        cdef int _look
        cdef uint32_t last
        for _look in range(LOOKS):
            if self.cursor == 0 or self.cursor >= <uint32_t>len(self.names):
                self.cursor = <uint32_t>len(self.names) - 1
            if self.cursor and self.names[self.cursor] is not None and self.core.namespace_refs[self.cursor] == 0:
                self.free(self.cursor)
            if self.cursor:
                self.cursor -= 1
        for _look in range(2 * LOOKS):
            last = <uint32_t>len(self.names) - 1
            if self.names[last] is not None:
                break
            self.mark_used(last)
            self.names.pop()
        if FIRST_CAPACITY < self.core.namespace_capacity and <uint32_t>len(self.names) < (
                self.core.namespace_capacity >> 2):
            self.shrink(self.core.namespace_capacity >> 1)
        return 0

    cdef int free(self, uint32_t number) except -1:
        """Free a number. A dict that has lost most of its names is made again; that may run finalisers, at the end."""
        cdef bytes name = self.names[number]
        cdef Py_ssize_t which = PyObject_Hash(name) & (SHARDS - 1)
        cdef dict shard = self.shards[which]
        cdef dict made
        del shard[name]
        self.names[number] = None
        self.mark_free(number)
        self.used -= 1
        if len(shard) == 0:
            self.shards[which] = None
            self.largest[which] = 0
        elif <Py_ssize_t>self.largest[which] > max(<Py_ssize_t>SHARD_AT_LEAST, 4 * len(shard)):
            made = dict(shard)
            if self.shards[which] is shard and len(made) == len(shard):
                self.shards[which] = made
                self.largest[which] = len(made)
        return 0

    # --- counts, and which numbers are free ---

    cdef int grow(self, uint32_t capacity) except -1:
        """Make room for so many numbers. Copies eight bytes for each, once in as many new ones."""
        cdef Budget *budget = self.core.arena.budget
        cdef uint32_t old = self.core.namespace_capacity
        cdef int64_t *refs = <int64_t *>raw_alloc(budget, refs_size(capacity))
        cdef uint64_t *bits = <uint64_t *>raw_alloc(budget, bits_size(capacity))
        cdef uint64_t *words = <uint64_t *>raw_alloc(budget, words_size(capacity))
        if refs == NULL or bits == NULL or words == NULL:
            raw_free(budget, refs, refs_size(capacity))
            raw_free(budget, bits, bits_size(capacity))
            raw_free(budget, words, words_size(capacity))
            raise MemoryError("no memory for namespaces; nothing has changed")
        memset(refs + old, 0, refs_size(capacity) - refs_size(old))
        memset(bits, 0, bits_size(capacity))
        memset(words, 0, words_size(capacity))
        if old:
            memcpy(refs, self.core.namespace_refs, refs_size(old))
            memcpy(bits, self.free_numbers, bits_size(old))
            memcpy(words, self.free_words, words_size(old))
            self.free_storage()
        self.core.namespace_refs = refs
        self.core.namespace_capacity = capacity
        self.free_numbers = bits
        self.free_words = words
        return 0

    cdef void shrink(self, uint32_t capacity) noexcept:
        """Give back the room for numbers from `capacity` on, of which none is returned. Copies nothing."""
        cdef Budget *budget = self.core.arena.budget
        cdef uint32_t old = self.core.namespace_capacity
        self.core.namespace_refs = <int64_t *>raw_shrink(
            budget, self.core.namespace_refs, refs_size(old), refs_size(capacity))
        self.free_numbers = <uint64_t *>raw_shrink(budget, self.free_numbers, bits_size(old), bits_size(capacity))
        self.free_words = <uint64_t *>raw_shrink(budget, self.free_words, words_size(old), words_size(capacity))
        self.core.namespace_capacity = capacity

    cdef void free_storage(self) noexcept:
        cdef uint32_t capacity = self.core.namespace_capacity
        raw_free(self.core.arena.budget, self.core.namespace_refs, refs_size(capacity))
        raw_free(self.core.arena.budget, self.free_numbers, bits_size(capacity))
        raw_free(self.core.arena.budget, self.free_words, words_size(capacity))

    cdef void mark_free(self, uint32_t number) noexcept:
        self.free_numbers[number >> 6] |= <uint64_t>1 << (number & 63)
        self.free_words[number >> 12] |= <uint64_t>1 << (number >> 6 & 63)
        if number >> 12 < self.lowest:
            self.lowest = number >> 12

    cdef void mark_used(self, uint32_t number) noexcept:
        self.free_numbers[number >> 6] &= ~(<uint64_t>1 << (number & 63))
        if self.free_numbers[number >> 6] == 0:
            self.free_words[number >> 12] &= ~(<uint64_t>1 << (number >> 6 & 63))

    cdef uint32_t lowest_free(self) noexcept:
        """The lowest free number; NO_NUMBER if none is. One step for 4,096 numbers that are all in use."""
        cdef uint32_t words = (self.core.namespace_capacity >> 12) + 1, word
        while self.lowest < words and self.free_words[self.lowest] == 0:
            self.lowest += 1
        if self.lowest == words:
            return NO_NUMBER
        word = (self.lowest << 6) + lowest_bit(self.free_words[self.lowest])
        return (word << 6) + lowest_bit(self.free_numbers[word])


cdef NamespaceTable new_namespaces(Core *core):
    """The namespaces of a backend, including VOID."""
    cdef NamespaceTable table = NamespaceTable.__new__(NamespaceTable)
    table.core = core
    table.shards = [None] * SHARDS
    table.largest = [0] * SHARDS
    table.names = []
    table.grow(FIRST_CAPACITY)
    table.intern(b"")
    table.core.namespace_refs[0] = 1
    return table
