"""Namespaces by number: entries carry 4 bytes, whatever a namespace is.

Number 0 is VOID, the empty name. A number lives while entries carry it, in any state of the backend, in journals and
snapshots too. A sweep, now and then, frees the others, so that past windows leave nothing behind.
"""

cimport cython
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy, memset

from statebackend._core.memory.arena cimport raw_alloc, raw_free
from statebackend._core.tables.cow_map cimport wait_for_others
from statebackend._core.memory.platform cimport unlikely

from statebackend.errors import ClosedError, UsageError

cdef enum:
    FIRST_CAPACITY = 64
    FIRST_SWEEP = 1024


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
        """The number of an encoded namespace, assigned now if it is new. O(1) amortised.

        It is valid until the next call of `number`, and as long as entries carry it or `pin` holds it.
        """
        return self.intern(name)

    def find(self, bytes name not None):
        """The number of an encoded namespace, or None if it has none."""
        return self.numbers.get(name)

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

    def __len__(self):
        return len(self.numbers)

    cdef int usable(self) except -1:
        if self.core == NULL:
            raise ClosedError("the backend of these namespaces is gone")
        if unlikely(self.core.busy):
            wait_for_others(self.core)
        return 0

    cdef uint32_t intern(self, bytes name) except? 0xFFFFFFFF:
        cdef uint32_t number
        self.usable()
        found = self.numbers.get(name)
        if found is not None:
            return found
        if len(self.numbers) >= self.sweep_at:
            self.sweep()
        if self.free_numbers:
            number = self.free_numbers.pop()
            self.names[number] = name
        else:
            number = <uint32_t>len(self.names)
            if number >= self.core.namespace_capacity:
                self.grow(2 * self.core.namespace_capacity)
            self.names.append(name)
        self.core.namespace_refs[number] = 0
        self.numbers[name] = number
        return number

    cdef int grow(self, uint32_t capacity) except -1:
        cdef int64_t *refs
        if capacity == 0:
            capacity = FIRST_CAPACITY
        refs = <int64_t *>raw_alloc(self.core.arena.budget, capacity * sizeof(int64_t))
        if refs == NULL:
            raise MemoryError("no memory for namespaces; nothing has changed")
        memset(refs, 0, capacity * sizeof(int64_t))
        if self.core.namespace_refs != NULL:
            memcpy(refs, self.core.namespace_refs, self.core.namespace_capacity * sizeof(int64_t))
            raw_free(self.core.arena.budget, self.core.namespace_refs,
                     self.core.namespace_capacity * sizeof(int64_t))
        self.core.namespace_refs = refs
        self.core.namespace_capacity = capacity
        return 0

    cdef int sweep(self) except -1:
        """Free the numbers that nothing carries. O(numbers), once per as many new ones."""
        cdef uint32_t number
        for number in range(1, len(self.names)):
            if self.names[number] is not None and self.core.namespace_refs[number] == 0:
                del self.numbers[self.names[number]]
                self.names[number] = None
                self.free_numbers.append(number)
        self.sweep_at = max(<Py_ssize_t>FIRST_SWEEP, 2 * len(self.numbers))
        return 0


cdef NamespaceTable new_namespaces(Core *core):
    """The namespaces of a backend, including VOID."""
    cdef NamespaceTable table = NamespaceTable.__new__(NamespaceTable)
    table.core = core
    table.numbers = {b"": 0}
    table.names = [b""]
    table.free_numbers = []
    table.sweep_at = FIRST_SWEEP
    table.grow(0)
    table.core.namespace_refs[0] = 1
    return table
