"""Timers as columns: registering, deleting and taking many of them in one loop."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memset

import numpy as np

from statebackend._core.handles.key_context cimport KeyContext
from statebackend._core.handles.time_index cimport TimerHandle
from statebackend._core.key_groups cimport group_of_hash, hash_canonical_bytes, hash_canonical_int
from statebackend._core.tables.cow_map cimport CoreKey

from statebackend.errors import UsageError


cdef int enter_number(KeyContext context, int64_t number) except -1:
    """Make the key with this canonical number current, without a look at the clock. Its group has been checked."""
    cdef CoreKey key
    memset(&key, 0, sizeof(CoreKey))
    key.number = number
    key.group = group_of_hash(hash_canonical_int(&context.codec.plan.program, number), context.max_parallelism)
    return context.adopt(&key, None)


cdef int enter_bytes(KeyContext context, const uint8_t *data, int64_t length) except -1:
    """Make the key with these canonical bytes current. Its group has been checked."""
    cdef CoreKey key
    cdef object owner = PyBytes_FromStringAndSize(<const char *>data, length)
    memset(&key, 0, sizeof(CoreKey))
    owner = context.codec.split_canonical(owner, &key)
    key.group = group_of_hash(hash_canonical_bytes(&context.codec.plan.program, <const uint8_t *>key.data, key.length),
                              context.max_parallelism)
    return context.adopt(&key, owner)


def change_timers(KeyContext context not None, TimerHandle handle not None, numbers, offsets, data,
                  const int64_t[::1] times not None, spaces, list names, bint registers):
    """Register timers, or delete them, row by row.

    Keys are the canonical `numbers`, or runs of `data` between `offsets`; all have been checked. `spaces` has the
    number of each row's namespace among the encoded `names`; None: the current one holds. O(log timers) each.
    """
    cdef const int64_t[::1] ints
    cdef const int64_t[::1] ends
    cdef const uint8_t[::1] bytes_of_keys
    cdef const int64_t[::1] namespaces
    cdef const uint8_t *first = NULL
    cdef Py_ssize_t i, n = times.shape[0]
    cdef int64_t last = -1
    cdef bint is_int = numbers is not None, has_spaces = spaces is not None
    if is_int:
        ints = numbers
        if ints.shape[0] != n:
            raise UsageError("columns of timers have different lengths")
    else:
        ends, bytes_of_keys = offsets, data
        if ends.shape[0] != n + 1:
            raise UsageError("columns of timers have different lengths")
        if bytes_of_keys.shape[0]:
            first = &bytes_of_keys[0]
    if has_spaces:
        namespaces = spaces
        if namespaces.shape[0] != n:
            raise UsageError("columns of timers have different lengths")
    for i in range(n):
        if has_spaces and namespaces[i] != last:
            last = namespaces[i]
            context.name_namespace(names[last])
        if is_int:
            enter_number(context, ints[i])
        else:
            enter_bytes(context, first + ends[i] if first != NULL else <const uint8_t *>b"", ends[i + 1] - ends[i])
        if registers:
            handle.add_timer(times[i])
        else:
            handle.drop_timer(times[i])


def take_timers(KeyContext context not None, TimerHandle handle not None, int64_t now, int64_t most):
    """Take the timers that are due, at most so many, in order: each becomes the current key and namespace.

    Returns the canonical keys as an array, or as offsets and data; the times; for each its namespace's number among the
    encoded names; and those names. O(log timers) each.
    """
    cdef bint is_int = context.codec.is_int
    cdef Py_ssize_t capacity = 256, n = 0
    cdef object timestamp, name, last = None
    cdef dict numbers = {}
    cdef int64_t number = 0
    cdef bytearray data = bytearray()
    columns = np.empty((3, capacity), dtype=np.int64)
    cdef int64_t[:, ::1] rows = columns
    while n < most:
        timestamp = handle.take_due(now)
        if timestamp is None:
            break
        if n == capacity:
            larger = np.empty((3, 2 * capacity), dtype=np.int64)
            larger[:, :n] = columns
            capacity, columns = 2 * capacity, larger
            rows = columns
        if is_int:
            rows[0, n] = context.key.number
        else:
            data += PyBytes_FromStringAndSize(context.key.data, context.key.length)
            rows[0, n] = len(data)
        name = context.namespace_name
        if name is not last:
            last = name
            number = numbers.setdefault(name, len(numbers))
        rows[1, n] = timestamp
        rows[2, n] = number
        n += 1
    keys = columns[0, :n].copy()
    if not is_int:
        keys = (np.concatenate([np.zeros(1, dtype=np.int64), keys]), np.frombuffer(bytes(data), dtype=np.uint8))
    return keys, columns[1, :n].copy(), columns[2, :n].copy(), list(numbers)
