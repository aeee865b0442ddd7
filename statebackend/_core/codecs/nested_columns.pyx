"""Columns of nested types: Arrow's buffers to stored values and canonical keys, and back, without the GIL.

A column is a tree, of one part for each type in its declared type:

    MAP(STRING, ROW(a=LONG))        offsets
      STRING                        offsets, bytes
      ROW                           validity
        LONG                        validity, numbers

To write (`nested_writer`), a tree of `SourcePart` points into the buffers of an Arrow array, and a function walks down
it once for each row, which appends the row's bytes. To read (`nested_reader`), a tree of `SinkPart` owns buffers that
grow; the same walk takes the bytes of a row apart and appends each value to its part, which then is an Arrow array. The
layouts of bytes are those of `statebackend.types.serializers` and of `statebackend.keys.encoders`.

Nothing here words an error. Damaged values, and values that Python's way would treat differently,
end the walk, and the function returns None: the caller then looks at each value in Python. So that is also what
damaged bytes lead to. All lengths and offsets are checked before they are followed; only values that are present are
looked at.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "nested_columns copies numbers, which are stored as little-endian"
    #endif
    """

cdef int64_t FEW = 12                    # keys of a map that are compared each with each

#: The forms by the names that trees of parts are built with.
FORMS = {
    "NOTHING": NOTHING, "BOOL": BOOL, "NUMBER": NUMBER, "RANGED": RANGED, "FLOAT": FLOAT, "DOUBLE": DOUBLE,
    "DECIMAL": DECIMAL, "WIDE_DECIMAL": WIDE_DECIMAL, "STRING": STRING, "BYTES": BYTES, "RECORD": RECORD,
    "LIST": LIST, "MAP": MAP,
}


# --- text ---

cdef bint is_long_text(const uint8_t *p, int64_t n) noexcept nogil:
    """Whether bytes are UTF-8 as Python decodes it: the shortest forms, no surrogates, nothing past U+10FFFF."""
    cdef int64_t i = 0
    cdef uint32_t point
    cdef uint8_t c
    while i < n:
        c = p[i]
        if c < 0x80:
            i += 1
        elif c < 0xE0:
            if c < 0xC2 or i + 2 > n or p[i + 1] & 0xC0 != 0x80:
                return False
            i += 2
        elif c < 0xF0:
            if i + 3 > n or p[i + 1] & 0xC0 != 0x80 or p[i + 2] & 0xC0 != 0x80:
                return False
            point = (<uint32_t> c & 0x0F) << 12 | (<uint32_t> p[i + 1] & 0x3F) << 6 | (p[i + 2] & 0x3F)
            if point < 0x800 or 0xD800 <= point <= 0xDFFF:
                return False
            i += 3
        else:
            if i + 4 > n or p[i + 1] & 0xC0 != 0x80 or p[i + 2] & 0xC0 != 0x80 or p[i + 3] & 0xC0 != 0x80:
                return False
            point = (<uint32_t> c & 0x0F) << 18 | (<uint32_t> p[i + 1] & 0x3F) << 12
            if point < 0x10000 or point > 0x10FFFF:
                return False
            i += 4
    return True


# --- the keys of a map ---

cdef int open_spans(Spans *spans, int64_t count) noexcept nogil:
    """Make room for `count` more integers, and take them."""
    cdef int64_t room
    cdef int64_t *at
    if spans.size + count > spans.room:
        room = 2 * spans.room + count + 64
        at = <int64_t *> realloc(spans.at, room * 8)
        if at == NULL:
            return NO_MEMORY
        spans.at = at
        spans.room = room
    spans.size += count
    return DONE

cdef inline bint same_bytes(const uint8_t *data, const int64_t *a, const int64_t *b) noexcept nogil:
    cdef int64_t length = a[1] - a[0]
    return length == b[1] - b[0] and memcmp(data + a[0], data + b[0], length) == 0

cdef uint64_t hash_of(const uint8_t *p, int64_t n) noexcept nogil:
    cdef uint64_t h = <uint64_t> 0x9E3779B97F4A7C15 ^ <uint64_t> n
    cdef uint64_t word
    while n >= 8:
        memcpy(&word, p, 8)
        h = (h ^ word) * <uint64_t> 0xFF51AFD7ED558CCD
        h ^= h >> 32
        p += 8
        n -= 8
    word = 0
    memcpy(&word, p, n)
    h = (h ^ word) * <uint64_t> 0xC4CEB9FE1A85EC53
    return h ^ (h >> 29)

cdef int64_t find_equal(const uint8_t *data, Spans *spans, int64_t base, int64_t count) noexcept nogil:
    """Note for each key the first that is equal; return how many differ, or -1 without memory. O(count)."""
    cdef int64_t *span = spans.at + base
    cdef int64_t *slots
    cdef int64_t i, j, distinct = 0
    cdef uint64_t mask, h
    if count <= FEW:
        for i in range(count):
            j = 0
            while not same_bytes(data, span + 3 * j, span + 3 * i):
                j += 1
            span[3 * i + 2] = j
            distinct += i == j
        return distinct
    mask = 32
    while mask < <uint64_t> (2 * count):
        mask *= 2
    slots = <int64_t *> malloc(mask * 8)
    if slots == NULL:
        return -1
    memset(slots, 0xFF, mask * 8)
    mask -= 1
    for i in range(count):
        h = hash_of(data + span[3 * i], span[3 * i + 1] - span[3 * i]) & mask
        while slots[h] >= 0 and not same_bytes(data, span + 3 * slots[h], span + 3 * i):
            h = (h + 1) & mask
        if slots[h] < 0:
            slots[h] = i
            distinct += 1
        span[3 * i + 2] = slots[h]
    free(slots)
    return distinct


# --- parts ---

cdef class Block:
    """Memory from malloc that belongs to this object; a buffer of bytes."""

    def __dealloc__(self):
        free(self.data)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *> self.data if self.data != NULL else <void *> &self.size,
                          self.size, 0, flags)


cdef Block block_of(void *data, Py_ssize_t size):
    """A block that owns `data`, whose first `size` bytes are in use."""
    cdef Block block = Block.__new__(Block)
    cdef void *smaller = realloc(data, size) if size else NULL
    if size == 0:
        free(data)
    block.data = <uint8_t *> (smaller if smaller != NULL or size == 0 else data)
    block.size = size
    return block


cdef int set_limits(str form, low, high, int64_t *lowest, int64_t *highest, uint64_t *limit) except -1:
    if form == "WIDE_DECIMAL":
        limit[0] = high & 0xFFFFFFFFFFFFFFFF
        limit[1] = high >> 64
    else:
        lowest[0], highest[0] = low, high
    return 0
