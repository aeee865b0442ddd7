"""Composite keys, one or many at a time: made of key groups, keys, namespaces and map keys, and cut into them again.

Keys, namespaces and map keys are in their canonical forms: an integer, or bytes; many of them, an array of int64, or
offsets and bytes. `composite_keys.pxd` draws the layout.
"""

import numpy as np

from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint64_t
from libc.string cimport memchr, memcpy, memset

from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.rocksdb.binding.buffers cimport Bytes, append, drop

from statebackend.errors import StoreError, UsageError


cdef bint append_escaped(Bytes *to, const char *data, size_t n) noexcept nogil:
    """Append bytes and their end; False without memory."""
    cdef size_t i, since = 0
    cdef char pair[2]
    pair[0] = 1
    for i in range(n):
        if <uint8_t>data[i] > 1:
            continue
        pair[1] = data[i] + 1
        if not append(to, data + since, i - since) or not append(to, pair, 2):
            return False
        since = i + 1
    pair[0] = 0
    return append(to, data + since, n - since) and append(to, pair, 1)


cdef size_t escaped_size(const char *data, size_t n) noexcept nogil:
    """The bytes up to the end of the first escaped run and with it; more than `n` if it has none."""
    cdef const char *end = <const char *>memchr(data, 0, n)
    return n + 1 if end == NULL else end - data + 1


cdef size_t key_size(const char *data, size_t n, bint is_int) noexcept nogil:
    """The bytes of key group and key; more than `n` if these are not whole."""
    if n < GROUP_BYTES:
        return n + 1
    if is_int:
        return GROUP_BYTES + INT_BYTES
    return GROUP_BYTES + escaped_size(data + GROUP_BYTES, n - GROUP_BYTES)


cdef size_t place_size(const char *data, size_t n, bint is_int) noexcept nogil:
    """The bytes of key group, key and namespace; more than `n` if these are not whole."""
    cdef size_t size = key_size(data, n, is_int)
    return n + 1 if size > n else size + escaped_size(data + size, n - size)


cdef int64_t int_at(const char *data) noexcept nogil:
    cdef uint64_t ordered
    memcpy(&ordered, data, 8)
    return <int64_t>(__builtin_bswap64(ordered) ^ (<uint64_t>1 << 63))


cdef bint append_unescaped(Bytes *to, const char *data, size_t n) noexcept nogil:
    """Append what `append_escaped` was given; `n` bytes without their end."""
    cdef size_t i = 0, since = 0
    cdef char plain
    if memchr(data, 1, n) == NULL:
        return append(to, data, n)
    while i < n:
        if data[i] != 1:
            i += 1
            continue
        plain = data[i + 1] - 1 if i + 1 < n else 1
        if not append(to, data + since, i - since) or not append(to, &plain, 1):
            return False
        i += 2
        since = i
    return since >= n or append(to, data + since, n - since)


cdef object _not_a_key():
    return StoreError("a key of the database cannot be read", code="STORE.DATABASE_CORRUPT",
                      hint="restore the state from a checkpoint")


cdef object _bytes_of(Bytes *data):
    try:
        return data.data[:data.size] if data.size else b""
    finally:
        drop(data)


# ------------------------------------------------------------------------------------------------- one key

cdef bint append_canonical(Bytes *to, canonical) except -1:
    cdef bint is_done
    if type(canonical) is int:
        is_done = append_int(to, canonical)
    else:
        is_done = append_escaped(to, <bytes?>canonical, len(canonical))
    if not is_done:
        raise MemoryError
    return True


def composite_key(int key_group, canonical, bytes namespace=None):
    """Return the place of a key: key group, key and namespace; without a namespace, the common prefix of its places.

    >>> composite_key(3, 7, b"").hex(" "), composite_key(3, b"a\\0b").hex(" ")
    ('00 03 80 00 00 00 00 00 00 07 00', '00 03 61 01 01 62 00')
    """
    cdef Bytes made
    memset(&made, 0, sizeof(made))
    try:
        if not append_group(&made, key_group):
            raise MemoryError
        append_canonical(&made, canonical)
        if namespace is not None and not append_escaped(&made, namespace, len(namespace)):
            raise MemoryError
        return made.data[:made.size]
    finally:
        drop(&made)


def group_prefix(int key_group):
    """Return what the keys of a key group begin with.

    >>> group_prefix(258)
    b'\\x01\\x02'
    """
    return bytes((key_group >> 8, key_group & 255))


def map_key_suffix(canonical):
    """Return the map key behind its place.

    >>> map_key_suffix(-1).hex(), map_key_suffix(b"a\\0")
    ('7fffffffffffffff', b'a\\x00')
    """
    cdef Bytes made
    if type(canonical) is not int:
        return <bytes?>canonical
    memset(&made, 0, sizeof(made))
    if not append_int(&made, canonical):
        drop(&made)
        raise MemoryError
    return _bytes_of(&made)


def map_key_of(bytes suffix not None, bint is_int):
    """Return the canonical form of a map key.

    >>> map_key_of(map_key_suffix(-7), True)
    -7
    """
    if not is_int:
        return suffix
    if len(suffix) != INT_BYTES:
        raise _not_a_key()
    return int_at(suffix)


def place_of(bytes key not None, bint is_int):
    """Return how many bytes of a composite key are key group, key and namespace.

    >>> place_of(composite_key(3, 7, b"n") + b"map key", True)
    12
    """
    cdef size_t size = place_size(key, len(key), is_int)
    if size > <size_t>len(key):
        raise _not_a_key()
    return size


def parts_of(bytes key not None, bint is_int):
    """Return key group, key, namespace, and the rest.

    >>> parts_of(composite_key(3, b"a\\x01", b"\\0n") + b"rest", False)
    (3, b'a\\x01', b'\\x00n', b'rest')
    """
    cdef Bytes made
    cdef const char *data = key
    cdef size_t n = len(key), first = key_size(data, n, is_int), size = place_size(data, n, is_int)
    cdef object canonical
    if size > n:
        raise _not_a_key()
    memset(&made, 0, sizeof(made))
    if is_int:
        canonical = int_at(data + GROUP_BYTES)
    else:
        if not append_unescaped(&made, data + GROUP_BYTES, first - GROUP_BYTES - 1):
            drop(&made)
            raise MemoryError
        canonical = _bytes_of(&made)
        memset(&made, 0, sizeof(made))
    if not append_unescaped(&made, data + first, size - first - 1):
        drop(&made)
        raise MemoryError
    return (<uint8_t>data[0] << 8) + <uint8_t>data[1], canonical, _bytes_of(&made), key[size:]


# ------------------------------------------------------------------------------------------------ many keys

cdef class _Column:
    """A column of canonical forms: numbers, or runs of bytes; or the same bytes in each row."""
    cdef const int64_t[::1] numbers
    cdef const int64_t[::1] offsets
    cdef const uint8_t[::1] data
    cdef const char *start
    cdef bytes one
    cdef size_t n_one
    cdef bint is_int
    cdef Py_ssize_t rows              # -1: any number

    def __init__(self, given, what):
        self.is_int = False
        if isinstance(given, bytes):
            self.one, self.rows = given, -1
            self.start, self.n_one = self.one, len(self.one)
        elif isinstance(given, tuple):
            self.offsets = np.ascontiguousarray(given[0], dtype=np.int64)
            self.data = np.frombuffer(given[1], np.uint8) if isinstance(given[1], bytes) else given[1]
            self.rows = check_rows(self.offsets, self.data, what)
            self.start = start_of(self.data)
        else:
            self.is_int = True
            self.numbers = np.ascontiguousarray(given, dtype=np.int64)
            self.rows = self.numbers.shape[0]

    cdef inline const char *run(self, Py_ssize_t i, size_t *n) noexcept nogil:
        if self.rows < 0:
            n[0] = self.n_one
            return self.start
        n[0] = self.offsets[i + 1] - self.offsets[i]
        return self.start + self.offsets[i]


def compose_many(const uint16_t[::1] key_groups not None, keys, namespaces=b"", map_keys=None):
    """Return composite keys as offsets and bytes.

    `namespaces` is one namespace for all, or a column of them.

    >>> offsets, data = compose_many(np.array([3, 4], np.uint16), np.array([7, 8]), b"", np.array([1, 2]))
    >>> offsets.tolist(), bytes(data[:11]).hex(" ")
    ([0, 19, 38], '00 03 80 00 00 00 00 00 00 07 00')
    """
    cdef _Column of_keys = _Column(keys, "keys"), spaces = _Column(namespaces, "namespaces"), inner = None
    cdef Py_ssize_t i, n = key_groups.shape[0]
    cdef Bytes made
    cdef const char *run
    cdef size_t size
    cdef bint is_done = True, has_map = map_keys is not None
    cdef int64_t[::1] ends
    if has_map:
        inner = _Column(map_keys, "map keys")
    for column in (of_keys, spaces, inner):
        if column is not None and (<_Column>column).rows not in (-1, n):
            raise UsageError("the columns of composite keys have different lengths")
    offsets = np.zeros(n + 1, np.int64)
    ends = offsets
    memset(&made, 0, sizeof(made))
    with nogil:
        for i in range(n):
            is_done = append_group(&made, key_groups[i])
            if of_keys.is_int:
                is_done = is_done and append_int(&made, of_keys.numbers[i])
            else:
                run = of_keys.run(i, &size)
                is_done = is_done and append_escaped(&made, run, size)
            run = spaces.run(i, &size)
            is_done = is_done and append_escaped(&made, run, size)
            if has_map and inner.is_int:
                is_done = is_done and append_int(&made, inner.numbers[i])
            elif has_map:
                run = inner.run(i, &size)
                is_done = is_done and append(&made, run, size)
            if not is_done:
                break
            ends[i + 1] = made.size
    if not is_done:
        drop(&made)
        raise MemoryError
    return offsets, np.frombuffer(_bytes_of(&made), np.uint8)


def split_many(const int64_t[::1] offsets not None, const uint8_t[::1] data not None, bint is_int, map_is_int=None):
    """Return columns of key groups, keys, namespaces, and map keys (None unless `map_is_int` says what they are).

    >>> offsets, data = compose_many(np.array([3, 4], np.uint16), np.array([7, 8]), b"n")
    >>> split_many(offsets, data, True)[:2]
    (array([3, 4], dtype=uint16), array([7, 8]))
    """
    cdef Py_ssize_t i, n = check_rows(offsets, data, "keys")
    cdef const char *start = start_of(data)
    cdef const char *key
    cdef size_t size, first, place
    cdef bint has_map = map_is_int is not None, inner_is_int = bool(map_is_int), is_done = True, is_whole = True
    cdef Bytes keys, spaces, inner
    cdef uint16_t[::1] group
    cdef int64_t[::1] number, key_end, space_end, inner_number, inner_end
    groups = np.zeros(n, np.uint16)
    numbers, inner_numbers = np.zeros(n if is_int else 0, np.int64), np.zeros(n if inner_is_int else 0, np.int64)
    key_ends, space_ends, inner_ends = (np.zeros(n + 1, np.int64) for _ in range(3))
    group, number, key_end, space_end = groups, numbers, key_ends, space_ends
    inner_number, inner_end = inner_numbers, inner_ends
    memset(&keys, 0, sizeof(keys))
    memset(&spaces, 0, sizeof(spaces))
    memset(&inner, 0, sizeof(inner))
    with nogil:
        for i in range(n):
            key = start + offsets[i]
            size = offsets[i + 1] - offsets[i]
            first, place = key_size(key, size, is_int), place_size(key, size, is_int)
            if place > size or (inner_is_int and size - place != INT_BYTES):
                is_whole = False
                break
            group[i] = (<uint16_t><uint8_t>key[0] << 8) + <uint8_t>key[1]
            if is_int:
                number[i] = int_at(key + GROUP_BYTES)
            else:
                is_done = append_unescaped(&keys, key + GROUP_BYTES, first - GROUP_BYTES - 1)
                key_end[i + 1] = keys.size
            is_done = is_done and append_unescaped(&spaces, key + first, place - first - 1)
            space_end[i + 1] = spaces.size
            if inner_is_int:
                inner_number[i] = int_at(key + place)
            elif has_map:
                is_done = is_done and append(&inner, key + place, size - place)
                inner_end[i + 1] = inner.size
            if not is_done:
                break
    of_keys, of_spaces, of_inner = _bytes_of(&keys), _bytes_of(&spaces), _bytes_of(&inner)
    if not is_done:
        raise MemoryError
    if not is_whole:
        raise _not_a_key()
    map_keys = None
    if has_map:
        map_keys = inner_numbers if inner_is_int else (inner_ends, np.frombuffer(of_inner, np.uint8))
    keys_column = numbers if is_int else (key_ends, np.frombuffer(of_keys, np.uint8))
    return groups, keys_column, (space_ends, np.frombuffer(of_spaces, np.uint8)), map_keys


def by_time_many(const int64_t[::1] offsets not None, const uint8_t[::1] data not None):
    """Return timers in the order of firing, of composite keys that end in times: their keys, and their key groups.

    Both are offsets and bytes. A key begins with the time; key and namespace follow.

    >>> from statebackend._core.rocksdb.overlay.composite_keys import map_key_suffix
    >>> row = composite_key(3, b"k", b"n") + map_key_suffix(1000)
    >>> (ends, keys), groups = by_time_many(np.array([0, len(row)]), np.frombuffer(row, np.uint8))
    >>> keys.tobytes() == map_key_suffix(1000) + composite_key(3, b"k", b"n")[2:], groups[1].tobytes()
    (True, b'\\x00\\x03')
    """
    cdef Py_ssize_t i, n = check_rows(offsets, data, "keys")
    cdef const char *start = start_of(data)
    cdef const char *key
    cdef char *out
    cdef char *group
    cdef size_t size
    cdef bint is_whole = True
    cdef uint8_t[::1] of_keys, of_groups
    # Each row is shorter by its key group. One byte more, so that there is an address for no rows too.
    keys = np.empty(max(offsets[n] - offsets[0] - GROUP_BYTES * n, 0) + 1, np.uint8)
    groups = np.empty(GROUP_BYTES * n + 1, np.uint8)
    of_keys, of_groups = keys, groups
    out, group = <char *>&of_keys[0], <char *>&of_groups[0]
    with nogil:
        for i in range(n):
            is_whole = offsets[i + 1] - offsets[i] >= <int64_t>(GROUP_BYTES + INT_BYTES)
            if not is_whole:
                break
            key, size = start + offsets[i], offsets[i + 1] - offsets[i]
            memcpy(out, key + size - INT_BYTES, INT_BYTES)
            memcpy(out + INT_BYTES, key + GROUP_BYTES, size - GROUP_BYTES - INT_BYTES)
            memcpy(group, key, GROUP_BYTES)
            out, group = out + size - GROUP_BYTES, group + GROUP_BYTES
    if not is_whole:
        raise _not_a_key()
    rows = np.arange(n + 1, dtype=np.int64) * GROUP_BYTES
    return (np.asarray(offsets) - offsets[0] - rows, keys[:-1]), (rows, groups[:-1])
