"""Hashes of the values of columns, added row by row, in two lanes of 64 bits.

Every function adds the hashes of one column to `lanes`, two for each row: a row is the sum of its columns, each of
which has its own seeds. `total` mixes each row before it adds the rows, so the digest notices a value that moves from
one row to another, and ignores the order of rows.

Manifests store the results. They must never change, on any machine, compiler or version: the numbers in
this file are part of the format, and the tests have golden values. Bytes are read as words whose first byte is the
lowest, the order of every processor that this is built for.

Each lane uses one of two mixers, known from MurmurHash3 and from Stafford's variant 13 of it. Both are bijections: two
values of one word never collide in either lane. Strings and lists pass through them word by word, the length first.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend.errors import UsageError

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "row_digest reads words as little-endian"
    #endif
    """

ctypedef fused offset_t:
    const int32_t
    const int64_t

cdef uint64_t STEP = 0x9E3779B97F4A7C15        # the factor for lengths
cdef uint64_t NULL_0 = 0x9FB21C651E98DF25      # turns a seed into a null's
cdef uint64_t NULL_1 = 0xC2B2AE3D27D4EB4F
cdef uint64_t ROW_0 = 0x165667B19E3779F9       # the seeds of rows
cdef uint64_t ROW_1 = 0x27D4EB2F165667C5
cdef uint64_t NAN_32 = 0x7FC00000
cdef uint64_t NAN_64 = 0x7FF8000000000000
cdef uint64_t NAN_16 = 0x7E00


cdef inline uint64_t mix_0(uint64_t h) noexcept nogil:
    h = (h ^ (h >> 33)) * <uint64_t>0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * <uint64_t>0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)

cdef inline uint64_t mix_1(uint64_t h) noexcept nogil:
    h = (h ^ (h >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * <uint64_t>0x94D049BB133111EB
    return h ^ (h >> 31)

cdef inline bint is_valid(const uint8_t *bits, int64_t at) noexcept nogil:
    return bits == NULL or bits[at >> 3] >> (at & 7) & 1

cdef inline uint64_t word_at(const uint8_t *p, Py_ssize_t n) noexcept nogil:
    """The first `n` bytes, at most 8, padded with zeros."""
    cdef uint64_t word = 0
    cdef uint32_t low, high
    if n >= 8:
        memcpy(&word, p, 8)
    elif n >= 4:
        memcpy(&low, p, 4)
        memcpy(&high, p + n - 4, 4)
        word = low | <uint64_t>high << (8 * (n - 4))
    elif n > 0:
        word = p[0] | <uint64_t>p[n >> 1] << (8 * (n >> 1)) | <uint64_t>p[n - 1] << (8 * (n - 1))
    return word

cdef inline uint64_t number_at(const uint8_t *p, int width) noexcept nogil:
    cdef uint16_t two
    cdef uint32_t four
    cdef uint64_t eight
    if width == 8:
        memcpy(&eight, p, 8)
        return eight
    if width == 4:
        memcpy(&four, p, 4)
        return four
    if width == 2:
        memcpy(&two, p, 2)
        return two
    return p[0]

cdef inline uint64_t float_at(const uint8_t *p, int width) noexcept nogil:
    """The bits of a float. Every NaN gets the same bits."""
    cdef uint64_t bits = number_at(p, width)
    if width == 8:
        return NAN_64 if bits & <uint64_t>0x7FFFFFFFFFFFFFFF > <uint64_t>0x7FF0000000000000 else bits
    if width == 4:
        return NAN_32 if bits & 0x7FFFFFFF > 0x7F800000 else bits
    return NAN_16 if bits & 0x7FFF > 0x7C00 else bits


cdef const uint8_t *bits_of(const uint8_t[::1] valid, int64_t first, Py_ssize_t n) except? NULL:
    if valid is None:
        return NULL
    if first < 0 or (first + n + 7) >> 3 > valid.shape[0]:
        raise UsageError("a column has fewer validity bits than values")
    return &valid[0]


def add_numbers(const uint8_t[::1] data not None, int width, bint is_float, const uint8_t[::1] valid, int64_t first,
                uint64_t seed_0, uint64_t seed_1, uint64_t[:, ::1] lanes not None):
    """Add numbers of 1, 2, 4 or 8 bytes; the first validity bit is `first`. O(rows)."""
    cdef Py_ssize_t i, n = lanes.shape[0]
    cdef const uint8_t *bits = bits_of(valid, first, n)
    cdef const uint8_t *p
    cdef uint64_t null_0 = mix_0(seed_0 ^ NULL_0), null_1 = mix_1(seed_1 ^ NULL_1), word
    if width not in (1, 2, 4, 8) or data.shape[0] != n * width:
        raise UsageError("a column is not as long as its rows are many")
    if n == 0:
        return
    p = &data[0]
    with nogil:
        if width == 8 and bits == NULL and not is_float:
            for i in range(n):
                memcpy(&word, p + 8 * i, 8)
                lanes[i, 0] += mix_0(word + seed_0)
                lanes[i, 1] += mix_1(word + seed_1)
        else:
            for i in range(n):
                if is_valid(bits, first + i):
                    word = float_at(p + width * i, width) if is_float else number_at(p + width * i, width)
                    lanes[i, 0] += mix_0(word + seed_0)
                    lanes[i, 1] += mix_1(word + seed_1)
                else:
                    lanes[i, 0] += null_0
                    lanes[i, 1] += null_1


def add_bytes(const uint8_t[::1] data not None, offset_t[::1] offsets not None, const uint8_t[::1] valid,
              int64_t first, uint64_t seed_0, uint64_t seed_1, uint64_t[:, ::1] lanes not None):
    """Add byte strings, each of which is in `data` between one offset and the next. O(bytes)."""
    cdef Py_ssize_t i, n = lanes.shape[0], size = data.shape[0]
    cdef const uint8_t *bits = bits_of(valid, first, n)
    cdef const uint8_t *p = &data[0] if size else NULL
    cdef const uint8_t *end
    cdef const uint8_t *at
    cdef uint64_t null_0 = mix_0(seed_0 ^ NULL_0), null_1 = mix_1(seed_1 ^ NULL_1), word, h_0, h_1
    cdef int64_t start, stop
    cdef bint is_broken = False
    if offsets.shape[0] != n + 1:
        raise UsageError("a column is not as long as its rows are many")
    with nogil:
        for i in range(n):
            if not is_valid(bits, first + i):
                lanes[i, 0] += null_0
                lanes[i, 1] += null_1
                continue
            start, stop = offsets[i], offsets[i + 1]
            if start < 0 or stop < start or stop > size:
                is_broken = True
                break
            h_0 = mix_0(seed_0 + STEP * <uint64_t>(stop - start))
            h_1 = mix_1(seed_1 + STEP * <uint64_t>(stop - start))
            at = p + start
            end = p + stop
            while at < end:
                word = word_at(at, end - at)
                h_0 = mix_0(h_0 ^ word)
                h_1 = mix_1(h_1 ^ word)
                at += 8
            lanes[i, 0] += h_0
            lanes[i, 1] += h_1
    if is_broken:
        raise UsageError("the offsets of a column lie outside its data")


def add_lists(const uint64_t[:, ::1] elements not None, offset_t[::1] offsets not None, bint is_ordered,
              const uint8_t[::1] valid, int64_t first, uint64_t seed_0, uint64_t seed_1,
              uint64_t[:, ::1] lanes not None):
    """Add lists of the values in `elements`, whose first is at `offsets[0]`; maps are not ordered. O(elements)."""
    cdef Py_ssize_t i, n = lanes.shape[0], size = elements.shape[0]
    cdef const uint8_t *bits = bits_of(valid, first, n)
    cdef uint64_t null_0 = mix_0(seed_0 ^ NULL_0), null_1 = mix_1(seed_1 ^ NULL_1), h_0, h_1
    cdef int64_t start, stop, at
    cdef bint is_broken = False
    if offsets.shape[0] != n + 1:
        raise UsageError("a column is not as long as its rows are many")
    with nogil:
        for i in range(n):
            if not is_valid(bits, first + i):
                lanes[i, 0] += null_0
                lanes[i, 1] += null_1
                continue
            start, stop = offsets[i] - offsets[0], offsets[i + 1] - offsets[0]
            if start < 0 or stop < start or stop > size:
                is_broken = True
                break
            h_0 = mix_0(seed_0 + STEP * <uint64_t>(stop - start))
            h_1 = mix_1(seed_1 + STEP * <uint64_t>(stop - start))
            if is_ordered:
                for at in range(start, stop):
                    h_0 = mix_0(h_0 ^ elements[at, 0])
                    h_1 = mix_1(h_1 ^ elements[at, 1])
            else:
                for at in range(start, stop):
                    h_0 += elements[at, 0]
                    h_1 += elements[at, 1]
                h_0, h_1 = mix_0(h_0), mix_1(h_1)
            lanes[i, 0] += h_0
            lanes[i, 1] += h_1
    if is_broken:
        raise UsageError("the offsets of a column lie outside its data")


def add_records(const uint64_t[:, ::1] fields not None, const uint8_t[::1] valid, int64_t first, uint64_t seed_0,
                uint64_t seed_1, uint64_t[:, ::1] lanes not None):
    """Add records; `fields` has the sums of their fields. O(rows)."""
    cdef Py_ssize_t i, n = lanes.shape[0]
    cdef const uint8_t *bits = bits_of(valid, first, n)
    cdef uint64_t null_0 = mix_0(seed_0 ^ NULL_0), null_1 = mix_1(seed_1 ^ NULL_1)
    if fields.shape[0] != n or fields.shape[1] != 2:
        raise UsageError("a column is not as long as its rows are many")
    with nogil:
        for i in range(n):
            if is_valid(bits, first + i):
                lanes[i, 0] += mix_0(fields[i, 0] + seed_0)
                lanes[i, 1] += mix_1(fields[i, 1] + seed_1)
            else:
                lanes[i, 0] += null_0
                lanes[i, 1] += null_1


def add_taken(const uint64_t[:, ::1] distinct not None, const int64_t[::1] indices not None,
              const uint8_t[::1] valid, int64_t first, uint64_t seed_0, uint64_t seed_1,
              uint64_t[:, ::1] lanes not None):
    """Add values of a dictionary, which `distinct` holds, by their positions in it. O(rows)."""
    cdef Py_ssize_t i, n = lanes.shape[0], size = distinct.shape[0]
    cdef const uint8_t *bits = bits_of(valid, first, n)
    cdef uint64_t null_0 = mix_0(seed_0 ^ NULL_0), null_1 = mix_1(seed_1 ^ NULL_1)
    cdef bint is_broken = False
    if indices.shape[0] != n:
        raise UsageError("a column is not as long as its rows are many")
    with nogil:
        for i in range(n):
            if not is_valid(bits, first + i):
                lanes[i, 0] += null_0
                lanes[i, 1] += null_1
            elif 0 <= indices[i] < size:
                lanes[i, 0] += distinct[indices[i], 0]
                lanes[i, 1] += distinct[indices[i], 1]
            else:
                is_broken = True
                break
    if is_broken:
        raise UsageError("an index lies outside its dictionary")


def add_nulls(uint64_t seed_0, uint64_t seed_1, uint64_t[:, ::1] lanes not None):
    """Add a column of nulls. O(rows)."""
    cdef Py_ssize_t i
    cdef uint64_t null_0 = mix_0(seed_0 ^ NULL_0), null_1 = mix_1(seed_1 ^ NULL_1)
    with nogil:
        for i in range(lanes.shape[0]):
            lanes[i, 0] += null_0
            lanes[i, 1] += null_1


def total(const uint64_t[:, ::1] lanes not None):
    """The two sums of all rows, each row mixed, modulo 2**64. O(rows)."""
    cdef Py_ssize_t i
    cdef uint64_t sum_0 = 0, sum_1 = 0
    with nogil:
        for i in range(lanes.shape[0]):
            sum_0 += mix_0(lanes[i, 0] + ROW_0)
            sum_1 += mix_1(lanes[i, 1] + ROW_1)
    return sum_0, sum_1
