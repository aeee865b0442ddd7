"""Columns of nested types: Arrow's buffers to stored values and canonical keys, and back, without the GIL.

A column is a tree, of one part for each type in its declared type:

    MAP(STRING, ROW(a=LONG))        offsets
      STRING                        offsets, bytes
      ROW                           validity
        LONG                        validity, numbers

To write, a tree of `SourcePart` points into the buffers of an Arrow array, and a function walks down it once for each
row, which appends the row's bytes. To read, a tree of `SinkPart` owns buffers that grow; the same walk takes the bytes
of a row apart and appends each value to its part, which then is an Arrow array. The layouts of bytes are those of
`statebackend.types.serializers.nested` and of `statebackend.keys.encoders`.

Nothing here words an error. Whatever is not as it should be, and whatever Python's way would treat in a way of its
own, ends the walk, and the function returns None: the caller then looks at each value in Python. So that is also what
damaged bytes lead to. All lengths and offsets are checked before they are followed; only values that are present are
looked at.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from statebackend.errors import UsageError

cdef extern from *:
    """
    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "nested_columns copies numbers, which are stored as little-endian"
    #endif
    """

cdef enum Form:
    NOTHING = 0                          # Arrow's null type: no value is present
    BOOL = 1                             # bits in Arrow, bytes in stored values
    NUMBER = 2                           # of any bits
    RANGED = 3                           # an integer between `low` and `high`
    FLOAT = 4
    DOUBLE = 5                           # for map keys and keys: one zero and one NaN; other doubles are NUMBERs
    DECIMAL = 6                          # of up to 18 digits: 16 bytes in Arrow, 8 in stored values
    WIDE_DECIMAL = 7                     # 16 bytes
    STRING = 8
    BYTES = 9
    RECORD = 10
    LIST = 11
    MAP = 12

#: The forms by the names that trees of parts are built with.
FORMS = {
    "NOTHING": NOTHING, "BOOL": BOOL, "NUMBER": NUMBER, "RANGED": RANGED, "FLOAT": FLOAT, "DOUBLE": DOUBLE,
    "DECIMAL": DECIMAL, "WIDE_DECIMAL": WIDE_DECIMAL, "STRING": STRING, "BYTES": BYTES, "RECORD": RECORD,
    "LIST": LIST, "MAP": MAP,
}

cdef enum Outcome:
    DONE = 0
    IRREGULAR = 1                        # Python must look at each value
    NO_MEMORY = 2

cdef uint64_t NAN_64 = 0x7FF8000000000000
cdef uint32_t NAN_32 = 0x7FC00000
cdef int64_t MOST = 0x7FFFFFFF           # elements of an Arrow list, or bytes of a string column: offsets have 32 bits
cdef int64_t LONGEST = 0xFFFFFFFF        # bytes of a slot, and elements of a stored list
cdef const uint8_t *EMPTY = <const uint8_t *> b""
cdef int64_t FEW = 12                    # keys of a map that are compared each with each

cdef struct Source:
    int form
    int64_t width                        # bytes of a slot; 0: they vary, and a length precedes them
    int64_t parts
    Source **part
    int64_t rows                         # how many rows may be asked for
    const uint8_t *valid                 # NULL: all are
    int64_t first                        # the bit of row 0 in `valid`
    const int32_t *ends_32               # offsets of row 0: one of the two
    const int64_t *ends_64
    int64_t step                         # or lists of a fixed size
    const uint8_t *data                  # of row 0; BOOL: of bit `origin`, which is row 0's
    int64_t origin
    int64_t size                         # bytes of STRING and BYTES
    int64_t low
    int64_t high                         # also the limit of a DECIMAL's magnitude
    uint64_t limit[2]                    # WIDE_DECIMAL: the power of ten that it lies below, low word first
    bint canonical

cdef struct Bytes:                       # grow at the end
    uint8_t *data
    int64_t size
    int64_t room

cdef struct Spans:                       # a stack of [start, end, first equal] of map keys
    int64_t *at
    int64_t size
    int64_t room

cdef struct Sink:
    int form
    int64_t width
    int64_t parts
    Sink **part
    int64_t count
    int64_t room                         # values that fit
    int64_t nulls
    uint8_t *valid                       # NULL until the first null
    uint8_t *data                        # numbers; of STRING and BYTES: the bytes
    int64_t stride                       # bytes of a number in Arrow; 0 for BOOL, which takes a bit
    int32_t *ends                        # room + 1
    int64_t size                         # bytes in `data` of STRING and BYTES
    int64_t size_room
    int64_t low
    int64_t high
    uint64_t limit[2]
    bint canonical


# --- bytes and numbers ---

cdef inline bint is_set(const uint8_t *bits, int64_t at) noexcept nogil:
    return bits[at >> 3] >> (at & 7) & 1

cdef int grow_bytes(Bytes *out, int64_t more) noexcept nogil:
    cdef int64_t room = out.room + (out.room >> 1) + more + 256
    cdef uint8_t *data = <uint8_t *> realloc(out.data, room)
    if data == NULL:
        return NO_MEMORY
    out.data = data
    out.room = room
    return DONE

cdef inline int reserve(Bytes *out, int64_t more) noexcept nogil:
    """Make room for `more` bytes."""
    return DONE if out.room - out.size >= more else grow_bytes(out, more)

cdef inline int put_zeros(Bytes *out, int64_t count) noexcept nogil:
    if reserve(out, count):
        return NO_MEMORY
    memset(out.data + out.size, 0, count)
    out.size += count
    return DONE

cdef inline int put_bytes(Bytes *out, const void *data, int64_t count) noexcept nogil:
    if reserve(out, count):
        return NO_MEMORY
    memcpy(out.data + out.size, data, count)
    out.size += count
    return DONE

cdef inline int put_number(Bytes *out, const uint8_t *p, int64_t width) noexcept nogil:
    """As put_bytes; copies of a width that the compiler knows are single instructions."""
    cdef uint8_t *to
    if reserve(out, width):
        return NO_MEMORY
    to = out.data + out.size
    out.size += width
    copy_number(to, p, width)
    return DONE

cdef inline void copy_number(uint8_t *to, const uint8_t *p, int64_t width) noexcept nogil:
    if width == 8:
        memcpy(to, p, 8)
    elif width == 4:
        memcpy(to, p, 4)
    elif width == 16:
        memcpy(to, p, 16)
    elif width == 2:
        memcpy(to, p, 2)
    else:
        to[0] = p[0]

cdef inline int64_t int_at(const uint8_t *p, int64_t width) noexcept nogil:
    cdef int64_t eight
    cdef int32_t four
    cdef int16_t two
    if width == 8:
        memcpy(&eight, p, 8)
        return eight
    if width == 4:
        memcpy(&four, p, 4)
        return four
    if width == 2:
        memcpy(&two, p, 2)
        return two
    return <int8_t> p[0]

cdef inline uint32_t length_at(const uint8_t *p) noexcept nogil:
    cdef uint32_t length
    memcpy(&length, p, 4)
    return length

cdef inline bint is_below(const uint8_t *p, const uint64_t *limit) noexcept nogil:
    """Whether the magnitude of an integer of 16 bytes lies below a limit."""
    cdef uint64_t low, high
    memcpy(&low, p, 8)
    memcpy(&high, p + 8, 8)
    if high >> 63:
        low = ~low + 1
        high = ~high + (low == 0)
    return high < limit[1] or (high == limit[1] and low < limit[0])

cdef inline uint64_t canonical_double(uint64_t bits) noexcept nogil:
    if bits == <uint64_t> 1 << 63:
        return 0
    return NAN_64 if bits & <uint64_t> 0x7FFFFFFFFFFFFFFF > <uint64_t> 0x7FF0000000000000 else bits

cdef inline uint32_t canonical_float(uint32_t bits) noexcept nogil:
    if bits == <uint32_t> 0x80000000:
        return 0
    return NAN_32 if bits & 0x7FFFFFFF > 0x7F800000 else bits

cdef inline bint is_signalling(uint32_t bits) noexcept nogil:
    """Python's floats are doubles, and the way there makes such a NaN a quiet one."""
    return bits & 0x7FFFFFFF > 0x7F800000 and not bits & 0x00400000

cdef inline bint is_ascii(const uint8_t *p, int64_t n) noexcept nogil:
    cdef uint64_t word, all_bits = 0
    cdef uint32_t low, high
    cdef int64_t i = 0
    if n >= 8:
        while i + 8 <= n:
            memcpy(&word, p + i, 8)
            all_bits |= word
            i += 8
        memcpy(&word, p + n - 8, 8)
        all_bits |= word
    elif n >= 4:
        memcpy(&low, p, 4)
        memcpy(&high, p + n - 4, 4)
        all_bits = low | high
    elif n > 0:
        all_bits = p[0] | p[n >> 1] | p[n - 1]
    return not all_bits & <uint64_t> 0x8080808080808080

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

cdef inline bint is_text(const uint8_t *p, int64_t n) noexcept nogil:
    return is_ascii(p, n) or is_long_text(p, n)


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


# --- writing: where a row's values lie ---

cdef inline bint is_present(const Source *s, int64_t row) noexcept nogil:
    if s.valid != NULL:
        return is_set(s.valid, s.first + row)
    return s.form != NOTHING

cdef inline bint span_of(const Source *s, int64_t row, int64_t size, int64_t *start, int64_t *length) noexcept nogil:
    """The part of the child, or of the bytes, that belongs to a row; false if it does not lie within `size`."""
    cdef int64_t end
    if s.ends_32 != NULL:
        start[0], end = s.ends_32[row], s.ends_32[row + 1]
    elif s.ends_64 != NULL:
        start[0], end = s.ends_64[row], s.ends_64[row + 1]
    else:
        start[0] = (s.origin + row) * s.step
        end = start[0] + s.step
    length[0] = end - start[0]
    return 0 <= start[0] <= end <= size


# --- writing: stored values ---

cdef int put_value(const Source *s, int64_t row, Bytes *out, Spans *spans) noexcept nogil:
    """Append the bytes of a value, which is present."""
    cdef const uint8_t *p
    cdef int64_t start, length, number
    cdef uint64_t eight
    cdef uint32_t four
    cdef uint8_t one
    if s.form == NUMBER:
        return put_number(out, s.data + row * s.width, s.width)
    if s.form == STRING or s.form == BYTES:
        if not span_of(s, row, s.size, &start, &length) or length > LONGEST:
            return IRREGULAR
        if s.form == STRING and not is_text(s.data + start, length):
            return IRREGULAR
        return put_bytes(out, s.data + start, length)
    if s.form == RECORD:
        return put_record(s, row, out, spans)
    if s.form == LIST:
        return put_list(s, row, out, spans)
    if s.form == MAP:
        return put_map(s, row, out, spans)
    if s.form == BOOL:
        one = is_set(s.data, s.origin + row)
        return put_number(out, &one, 1)
    if s.form == RANGED:
        p = s.data + row * s.width
        if not s.low <= int_at(p, s.width) <= s.high:
            return IRREGULAR
        return put_number(out, p, s.width)
    if s.form == FLOAT:
        memcpy(&four, s.data + row * 4, 4)
        if s.canonical:
            four = canonical_float(four)
        elif is_signalling(four):
            return IRREGULAR
        return put_number(out, <uint8_t *> &four, 4)
    if s.form == DOUBLE:
        memcpy(&eight, s.data + row * 8, 8)
        eight = canonical_double(eight)
        return put_number(out, <uint8_t *> &eight, 8)
    p = s.data + row * 16
    if s.form == DECIMAL:
        if not decimal_fits(s, p, &number):
            return IRREGULAR
        return put_number(out, p, 8)
    if not is_below(p, s.limit):
        return IRREGULAR
    return put_number(out, p, 16)

cdef inline bint decimal_fits(const Source *s, const uint8_t *p, int64_t *number) noexcept nogil:
    number[0] = int_at(p, 8)
    return int_at(p + 8, 8) == number[0] >> 63 and s.low <= number[0] <= s.high

cdef int put_slot(const Source *s, int64_t row, Bytes *out, Spans *spans) noexcept nogil:
    """Append the slot of a value, which is present."""
    cdef int64_t at = out.size
    cdef int64_t length
    cdef uint32_t written
    cdef int outcome
    if s.width:
        return put_value(s, row, out, spans)
    if reserve(out, 4):
        return NO_MEMORY
    out.size += 4
    outcome = put_value(s, row, out, spans)
    if outcome:
        return outcome
    length = out.size - at - 4
    if length > LONGEST:
        return IRREGULAR
    written = <uint32_t> length
    memcpy(out.data + at, &written, 4)
    return DONE

cdef inline int put_part(const Source *s, int64_t row, Bytes *out, Spans *spans, int64_t bitmap,
                         int64_t position) noexcept nogil:
    """Append the slot of one part of a value, and mark it in the bitmap at `bitmap` if it is null."""
    if is_present(s, row):
        return put_slot(s, row, out, spans)
    out.data[bitmap + (position >> 3)] |= <uint8_t> (1 << (position & 7))
    return put_zeros(out, s.width if s.width else 4)

cdef int put_record(const Source *s, int64_t row, Bytes *out, Spans *spans) noexcept nogil:
    cdef int64_t i, bitmap = out.size
    cdef int outcome = put_zeros(out, (s.parts + 7) >> 3)
    for i in range(s.parts):
        if outcome:
            return outcome
        outcome = put_part(s.part[i], row, out, spans, bitmap, i)
    return outcome

cdef inline int put_count(Bytes *out, int64_t count) noexcept nogil:
    """Append a count, and an empty bitmap for as many values."""
    cdef uint32_t number = <uint32_t> count
    if count > LONGEST:
        return IRREGULAR
    if put_bytes(out, &number, 4):
        return NO_MEMORY
    return put_zeros(out, (count + 7) >> 3)

cdef int put_list(const Source *s, int64_t row, Bytes *out, Spans *spans) noexcept nogil:
    cdef Source *part = s.part[0]
    cdef int64_t i, start, count, bitmap = out.size + 4
    cdef int outcome
    if not span_of(s, row, part.rows, &start, &count):
        return IRREGULAR
    outcome = put_count(out, count)
    if outcome:
        return outcome
    if part.form == NUMBER and part.valid == NULL:
        return put_bytes(out, part.data + start * part.width, count * part.width)
    for i in range(count):
        outcome = put_part(part, start + i, out, spans, bitmap, i)
        if outcome:
            return outcome
    return DONE

cdef int put_map(const Source *s, int64_t row, Bytes *out, Spans *spans) noexcept nogil:
    """Append a map. Of entries with equal keys, the place of the first and the value of the last remain."""
    cdef Source *keys = s.part[0]
    cdef int64_t i, start, count, distinct, begin = out.size, base = spans.size
    cdef int outcome
    if not span_of(s, row, keys.rows, &start, &count):
        return IRREGULAR
    outcome = put_count(out, count)
    if not outcome and open_spans(spans, 3 * count):
        outcome = NO_MEMORY
    for i in range(count):
        if outcome:
            return outcome
        if not is_present(keys, start + i):
            return IRREGULAR
        spans.at[base + 3 * i] = out.size
        outcome = put_slot(keys, start + i, out, spans)
        spans.at[base + 3 * i + 1] = out.size
        if not outcome:
            outcome = put_part(s.part[1], start + i, out, spans, begin + 4, i)
    if outcome:
        return outcome
    distinct = find_equal(out.data, spans, base, count)
    if distinct < 0:
        return NO_MEMORY
    if distinct < count:
        out.size = begin
        outcome = put_distinct(s, start, count, distinct, out, spans, base)
    spans.size = base
    return outcome

cdef int put_distinct(const Source *s, int64_t start, int64_t count, int64_t distinct, Bytes *out, Spans *spans,
                      int64_t base) noexcept nogil:
    cdef int64_t i, position = 0, bitmap = out.size + 4
    cdef int outcome = put_count(out, distinct)
    for i in range(count):
        # From here on, the start of a first key is the position of the last that is equal.
        spans.at[base + 3 * spans.at[base + 3 * i + 2]] = i
    for i in range(count):
        if outcome:
            return outcome
        if spans.at[base + 3 * i + 2] != i:
            continue
        outcome = put_slot(s.part[0], start + i, out, spans)
        if not outcome:
            outcome = put_part(s.part[1], start + spans.at[base + 3 * i], out, spans, bitmap, position)
        position += 1
    return outcome


# --- writing: canonical keys ---

cdef int put_key(const Source *s, int64_t row, Bytes *out) noexcept nogil:
    """Append the canonical form of a part of a composite key, which is present, or of a whole one."""
    cdef const uint8_t *p
    cdef int64_t i, start, length, number
    cdef uint64_t eight
    cdef uint32_t four
    cdef int32_t signed_four
    cdef uint8_t fill
    cdef int outcome
    if s.form == RECORD:
        for i in range(s.parts):
            if reserve(out, 9):
                return NO_MEMORY
            if not is_present(s.part[i], row):
                out.data[out.size] = 0
                out.size += 1
                continue
            out.data[out.size] = 1
            out.size += 1
            outcome = put_key(s.part[i], row, out)
            if outcome:
                return outcome
        return DONE
    if s.form == STRING or s.form == BYTES:
        if not span_of(s, row, s.size, &start, &length) or length > LONGEST:
            return IRREGULAR
        if s.form == STRING and not is_text(s.data + start, length):
            return IRREGULAR
        four = <uint32_t> length
        if put_bytes(out, &four, 4):
            return NO_MEMORY
        return put_bytes(out, s.data + start, length)
    if s.form == WIDE_DECIMAL:
        p = s.data + row * 16
        if not is_below(p, s.limit):
            return IRREGULAR
        # Big-endian, without leading bytes that only repeat the sign bit of the byte after them.
        length = 16
        fill = 0xFF if p[15] >> 7 else 0
        while length > 1 and p[length - 1] == fill and p[length - 2] >> 7 == fill & 1:
            length -= 1
        four = <uint32_t> length
        if put_bytes(out, &four, 4) or reserve(out, 16):
            return NO_MEMORY
        for i in range(length):
            out.data[out.size + i] = p[length - 1 - i]
        out.size += length
        return DONE
    if s.form == BOOL:
        number = is_set(s.data, s.origin + row)
    elif s.form == FLOAT:
        memcpy(&four, s.data + row * 4, 4)
        four = canonical_float(four)
        memcpy(&signed_four, &four, 4)
        number = signed_four
    elif s.form == DOUBLE:
        memcpy(&eight, s.data + row * 8, 8)
        eight = canonical_double(eight)
        memcpy(&number, &eight, 8)
    elif s.form == DECIMAL:
        if not decimal_fits(s, s.data + row * 16, &number):
            return IRREGULAR
    else:
        number = int_at(s.data + row * s.width, s.width)
    return put_number(out, <uint8_t *> &number, 8)


# --- reading: what values are appended to ---

cdef int make_room(Sink *s, int64_t more) noexcept nogil:
    """Make room for `more` values; a record makes it in its fields too, which have as many values as it has."""
    cdef int64_t i, room = s.count + more
    cdef void *grown
    cdef int outcome
    if room <= s.room:
        return DONE
    if room > MOST:
        return IRREGULAR
    if room < s.room + (s.room >> 1):
        room = s.room + (s.room >> 1)
    room = (room + 7) & ~<int64_t> 7
    if s.form == BOOL or s.stride:
        grown = realloc(s.data, room * s.stride if s.stride else room >> 3)
        if grown == NULL:
            return NO_MEMORY
        s.data = <uint8_t *> grown
    elif s.form != RECORD:
        grown = realloc(s.ends, (room + 1) * 4)
        if grown == NULL:
            return NO_MEMORY
        s.ends = <int32_t *> grown
        s.ends[0] = 0
    if s.valid != NULL:
        grown = realloc(s.valid, room >> 3)
        if grown == NULL:
            return NO_MEMORY
        s.valid = <uint8_t *> grown
        memset(s.valid + (s.room >> 3), 0xFF, (room - s.room) >> 3)
    if s.form == RECORD:
        for i in range(s.parts):
            outcome = make_room(s.part[i], room - s.part[i].count)
            if outcome:
                return outcome
    s.room = room
    return DONE

cdef inline void add_bit(Sink *s, bint bit) noexcept nogil:
    cdef int64_t at = s.count
    if at & 7:
        s.data[at >> 3] |= <uint8_t> (bit << (at & 7))
    else:
        s.data[at >> 3] = bit
    s.count = at + 1

cdef int add_null(Sink *s) noexcept nogil:
    cdef int64_t i, at = s.count
    if s.valid == NULL:
        s.valid = <uint8_t *> malloc(s.room >> 3)
        if s.valid == NULL:
            return NO_MEMORY
        memset(s.valid, 0xFF, s.room >> 3)
    s.valid[at >> 3] &= <uint8_t> ~(1 << (at & 7))
    s.nulls += 1
    if s.form == BOOL:
        add_bit(s, False)
        return DONE
    s.count += 1
    if s.stride:
        memset(s.data + at * s.stride, 0, s.stride)
    elif s.form != RECORD:
        s.ends[at + 1] = s.ends[at]
    for i in range(s.parts if s.form == RECORD else 0):
        if add_null(s.part[i]):
            return NO_MEMORY
    return DONE

cdef int add_run(Sink *s, const uint8_t *p, int64_t length) noexcept nogil:
    """Append a value of STRING or BYTES."""
    cdef int64_t room, size = s.size + length
    cdef uint8_t *grown
    if s.form == STRING and not is_text(p, length):
        return IRREGULAR
    if size > s.size_room:
        if size > MOST:
            return IRREGULAR
        room = s.size_room + (s.size_room >> 1) + length + 256
        grown = <uint8_t *> realloc(s.data, room)
        if grown == NULL:
            return NO_MEMORY
        s.data = grown
        s.size_room = room
    if length:
        memcpy(s.data + s.size, p, length)
    s.size = size
    s.count += 1
    s.ends[s.count] = <int32_t> size
    return DONE


# --- reading: stored values ---

cdef int take_value(Sink *s, const uint8_t *p, int64_t length, Spans *spans) noexcept nogil:
    """Append the value of these bytes. There is room for it."""
    cdef int64_t number
    cdef uint64_t eight
    cdef uint32_t four
    cdef uint8_t *to
    if s.width and length != s.width:
        return IRREGULAR
    if s.form == NUMBER:
        copy_number(s.data + s.count * s.stride, p, s.stride)
        s.count += 1
        return DONE
    if s.form == STRING or s.form == BYTES:
        return add_run(s, p, length)
    if s.form == RECORD:
        return take_record(s, p, length, spans)
    if s.form == LIST:
        return take_list(s, p, length, spans)
    if s.form == MAP:
        return take_map(s, p, length, spans)
    if s.form == BOOL:
        if p[0] > 1:
            return IRREGULAR
        add_bit(s, p[0])
        return DONE
    to = s.data + s.count * s.stride
    if s.form == RANGED:
        if not s.low <= int_at(p, s.width) <= s.high:
            return IRREGULAR
    elif s.form == FLOAT:
        memcpy(&four, p, 4)
        if is_signalling(four) or (s.canonical and four != canonical_float(four)):
            return IRREGULAR
    elif s.form == DOUBLE:
        memcpy(&eight, p, 8)
        if eight != canonical_double(eight):
            return IRREGULAR
    elif s.form == DECIMAL:
        number = int_at(p, 8)
        if not s.low <= number <= s.high:
            return IRREGULAR
        add_wide(s, number)
        return DONE
    elif not is_below(p, s.limit):
        return IRREGULAR
    copy_number(to, p, s.stride)
    s.count += 1
    return DONE

cdef inline void add_wide(Sink *s, int64_t number) noexcept nogil:
    """Append the 16 bytes that Arrow has for a decimal."""
    cdef int64_t high = number >> 63
    memcpy(s.data + s.count * 16, &number, 8)
    memcpy(s.data + s.count * 16 + 8, &high, 8)
    s.count += 1

cdef inline int take_slot(Sink *s, const uint8_t *p, int64_t length, int64_t *at, bint is_null,
                          Spans *spans) noexcept nogil:
    """Append the value, or the null, whose slot is at `at`, and go on to the next slot."""
    cdef int64_t i, size = s.width, start = at[0]
    if not size:
        if length - start < 4:
            return IRREGULAR
        size = length_at(p + start)
        start += 4
    if size > length - start:
        return IRREGULAR
    at[0] = start + size
    if not is_null:
        return take_value(s, p + start, size, spans)
    if s.canonical:
        # Two keys are the same if their bytes are. A null with other bytes than zeros breaks that.
        if not s.width and size:
            return IRREGULAR
        for i in range(size):
            if p[start + i]:
                return IRREGULAR
    return add_null(s)

cdef int take_record(Sink *s, const uint8_t *p, int64_t length, Spans *spans) noexcept nogil:
    cdef int64_t i, at = (s.parts + 7) >> 3
    cdef int outcome
    if length < at or (s.canonical and s.parts & 7 and p[at - 1] >> (s.parts & 7)):
        return IRREGULAR
    for i in range(s.parts):
        outcome = take_slot(s.part[i], p, length, &at, is_set(p, i), spans)
        if outcome:
            return outcome
    if at != length:
        return IRREGULAR
    s.count += 1
    return DONE

cdef inline int64_t least(const Sink *s) noexcept nogil:
    """The fewest bytes of a slot."""
    return s.width if s.width else 4

cdef int64_t open_container(Sink *s, const uint8_t *p, int64_t length, int64_t *at, int *outcome) noexcept nogil:
    """The number of elements, for which there then is room, and where the first slot is; `outcome` tells if not."""
    cdef int64_t i, count, each = 0
    outcome[0] = IRREGULAR
    if length < 4:
        return 0
    count = length_at(p)
    at[0] = 4 + ((count + 7) >> 3)
    for i in range(s.parts):
        each += least(s.part[i])
    if length < at[0] or count * each > length - at[0]:
        return 0
    outcome[0] = DONE
    for i in range(s.parts):
        if not outcome[0]:
            outcome[0] = make_room(s.part[i], count)
    return count

cdef inline void close_container(Sink *s) noexcept nogil:
    s.count += 1
    s.ends[s.count] = <int32_t> s.part[0].count

cdef int take_list(Sink *s, const uint8_t *p, int64_t length, Spans *spans) noexcept nogil:
    cdef Sink *part = s.part[0]
    cdef int64_t i, at, count
    cdef int outcome
    cdef bint has_nulls = False
    count = open_container(s, p, length, &at, &outcome)
    if outcome:
        return outcome
    if part.form == NUMBER:
        for i in range(4, at):
            has_nulls |= p[i] != 0
        if not has_nulls:
            if length - at != count * part.width:
                return IRREGULAR
            if count:
                memcpy(part.data + part.count * part.width, p + at, length - at)
                part.count += count
            close_container(s)
            return DONE
    for i in range(count):
        outcome = take_slot(part, p, length, &at, is_set(p + 4, i), spans)
        if outcome:
            return outcome
    if at != length:
        return IRREGULAR
    close_container(s)
    return DONE

cdef int take_map(Sink *s, const uint8_t *p, int64_t length, Spans *spans) noexcept nogil:
    cdef int64_t i, at, count, base = spans.size, distinct
    cdef int outcome
    count = open_container(s, p, length, &at, &outcome)
    if outcome:
        return outcome
    if open_spans(spans, 3 * count):
        return NO_MEMORY
    for i in range(count):
        spans.at[base + 3 * i] = at
        outcome = take_slot(s.part[0], p, length, &at, False, spans)
        if outcome:
            return outcome
        spans.at[base + 3 * i + 1] = at
        outcome = take_slot(s.part[1], p, length, &at, is_set(p + 4, i), spans)
        if outcome:
            return outcome
    if at != length:
        return IRREGULAR
    distinct = find_equal(p, spans, base, count)
    spans.size = base
    if distinct != count:
        return NO_MEMORY if distinct < 0 else IRREGULAR
    close_container(s)
    return DONE


# --- reading: canonical keys ---

cdef int take_key(Sink *s, const uint8_t *p, int64_t length, int64_t *at) noexcept nogil:
    """Append the part of a canonical key that is at `at`, and go on to the next part."""
    cdef int64_t i, number, size, start
    cdef int outcome
    cdef uint8_t fill
    cdef uint8_t *to
    if s.form == RECORD:
        for i in range(s.parts):
            start = at[0]
            if start >= length or p[start] > 1:
                return IRREGULAR
            at[0] = start + 1
            outcome = take_key(s.part[i], p, length, at) if p[start] else add_null(s.part[i])
            if outcome:
                return outcome
        s.count += 1
        return DONE
    if s.form == STRING or s.form == BYTES or s.form == WIDE_DECIMAL:
        if length - at[0] < 4:
            return IRREGULAR
        size = length_at(p + at[0])
        start = at[0] + 4
        if size > length - start:
            return IRREGULAR
        at[0] = start + size
        if s.form != WIDE_DECIMAL:
            return add_run(s, p + start, size)
        if not 1 <= size <= 16:
            return IRREGULAR
        to = s.data + s.count * 16
        fill = 0xFF if p[start] >> 7 else 0
        memset(to, fill, 16)
        for i in range(size):
            to[i] = p[start + size - 1 - i]
        s.count += 1
        return DONE
    if length - at[0] < 8:
        return IRREGULAR
    number = int_at(p + at[0], 8)
    at[0] += 8
    if s.form == BOOL:
        add_bit(s, number != 0)
    elif s.form == DECIMAL:
        add_wide(s, number)
    else:
        if s.stride < 8 and number != int_at(<uint8_t *> &number, s.stride):
            return IRREGULAR
        if s.stride == 8:
            memcpy(s.data + s.count * 8, &number, 8)
        else:
            memcpy(s.data + s.count * s.stride, &number, s.stride)
        s.count += 1
    return DONE


# --- what Python sees ---

cdef class Block:
    """Memory from malloc that belongs to this object; a buffer of bytes."""
    cdef uint8_t *data
    cdef Py_ssize_t size

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


cdef class SourcePart:
    """Where the values of one part of a column lie, in buffers that it keeps.

    `rows` values start at element `origin` of `data`, or of `offsets`, whose numbers have 4 or 8 bytes (`is_wide`).
    Lists of a fixed `step` have no offsets. The bit of the first value in `valid` is `first`.
    """
    cdef Source node
    cdef tuple parts
    cdef list kept

    def __cinit__(self, str form not None, int64_t width, int64_t rows, *, int64_t origin=0, valid=None,
                  int64_t first=0, data=None, offsets=None, bint is_wide=False, int64_t step=-1, low=-2**63,
                  high=2**63 - 1, bint is_canonical=False, tuple parts=()):
        cdef int64_t stride = 16 if form == "DECIMAL" else width
        cdef Py_ssize_t i, size
        self.kept = []
        self.parts = parts
        self.node.form = FORMS[form]
        self.node.width = width
        self.node.rows = rows
        self.node.first = first
        self.node.origin = origin
        self.node.step = step
        self.node.canonical = is_canonical
        self.node.data = EMPTY
        set_limits(form, low, high, &self.node.low, &self.node.high, self.node.limit)
        if rows < 0 or origin < 0 or first < 0:
            raise UsageError("a part of a column has fewer than no values")
        if valid is not None:
            self.node.valid = self.pointer(valid, &size)
            check_size(size, (first + rows + 7) >> 3)
        if offsets is not None and rows:
            if is_wide:
                self.node.ends_64 = <const int64_t *> self.pointer(offsets, &size) + origin
                check_size(size, (origin + rows + 1) * 8)
            else:
                self.node.ends_32 = <const int32_t *> self.pointer(offsets, &size) + origin
                check_size(size, (origin + rows + 1) * 4)
        if data is not None:
            self.node.data = self.pointer(data, &size)
            self.node.size = size
        if self.node.form == BOOL:
            check_size(self.node.size, (origin + rows + 7) >> 3)
        elif NUMBER <= self.node.form <= WIDE_DECIMAL:
            check_size(self.node.size, (origin + rows) * stride)
            self.node.data += origin * stride
        elif self.node.form != RECORD and self.node.form != NOTHING and offsets is None and rows and step < 0:
            raise UsageError("a part of a column has no offsets")
        self.node.parts = len(parts)
        self.node.part = <Source **> calloc(len(parts) + 1, sizeof(Source *))
        if self.node.part == NULL:
            raise MemoryError("the parts of a column")
        for i in range(len(parts)):
            self.node.part[i] = &(<SourcePart?> parts[i]).node
            if self.node.form == RECORD or (self.node.form == MAP and i):
                check_size((<SourcePart> parts[i]).node.rows, (<SourcePart> parts[0]).node.rows)
            if self.node.form == RECORD:
                check_size((<SourcePart> parts[i]).node.rows, rows)
        if len(parts) < (self.node.form == LIST) + 2 * (self.node.form == MAP):
            raise UsageError("a part of a column has too few parts of its own")

    def __dealloc__(self):
        free(self.node.part)

    cdef const uint8_t *pointer(self, buffer, Py_ssize_t *size) except? NULL:
        cdef const uint8_t[::1] view = memoryview(buffer).cast("B")
        self.kept.append(buffer)
        size[0] = view.shape[0]
        return &view[0] if size[0] else EMPTY


cdef class SinkPart:
    """A part of a column that values are appended to; `stride` is the bytes of one in Arrow, where it has a number."""
    cdef Sink node
    cdef readonly tuple parts

    def __cinit__(self, str form not None, int64_t width, *, int64_t stride=0, low=-2**63, high=2**63 - 1,
                  bint is_canonical=False, tuple parts=()):
        cdef Py_ssize_t i
        self.parts = parts
        self.node.form = FORMS[form]
        self.node.width = width
        self.node.stride = stride
        self.node.canonical = is_canonical
        set_limits(form, low, high, &self.node.low, &self.node.high, self.node.limit)
        self.node.parts = len(parts)
        self.node.part = <Sink **> calloc(len(parts) + 1, sizeof(Sink *))
        if self.node.part == NULL:
            raise MemoryError("the parts of a column")
        for i in range(len(parts)):
            self.node.part[i] = &(<SinkPart?> parts[i]).node

    def __dealloc__(self):
        free(self.node.part)
        free(self.node.valid)
        free(self.node.data)
        free(self.node.ends)

    def take_buffers(self):
        """Return the count of values, the count of nulls, and the buffers as Arrow orders them, which leave this.

        O(1).
        """
        cdef Sink *s = &self.node
        cdef list buffers = [block_of(s.valid, (s.count + 7) >> 3) if s.valid != NULL else None]
        s.valid = NULL
        if s.form >= STRING and s.form != RECORD:
            buffers.append(block_of(s.ends, (s.count + 1) * 4) if s.ends != NULL else bytes(4))
            s.ends = NULL
        if s.form <= BYTES:
            size = s.size
            if s.form < STRING:
                size = s.count * s.stride if s.stride else (s.count + 7) >> 3
            buffers.append(block_of(s.data, size))
            s.data = NULL
        return s.count, s.nulls, buffers


cdef int check_size(int64_t size, int64_t needed) except -1:
    if size < needed:
        raise UsageError("a buffer of a column is shorter than its values", detail=f"{size} of {needed} bytes")
    return 0

cdef int set_limits(str form, low, high, int64_t *lowest, int64_t *highest, uint64_t *limit) except -1:
    if form == "WIDE_DECIMAL":
        limit[0] = high & 0xFFFFFFFFFFFFFFFF
        limit[1] = high >> 64
    else:
        lowest[0], highest[0] = low, high
    return 0


def write_values(SourcePart column not None, bint is_key=False):
    """Return offsets and data of the stored values, or canonical keys, of a column; None: look at each value.

    A null row has no bytes; of a type of fixed width, as many zeros. A null key is not regular. O(bytes).
    """
    cdef Source *s = &column.node
    cdef int64_t row, rows = s.rows
    cdef Bytes out
    cdef Spans spans
    cdef int outcome = DONE
    offsets = np.zeros(rows + 1, dtype=np.int64)
    cdef int64_t[::1] ends = offsets
    memset(&out, 0, sizeof(out))
    memset(&spans, 0, sizeof(spans))
    with nogil:
        outcome = grow_bytes(&out, 16 * rows)
        for row in range(rows):
            if outcome:
                break
            if is_present(s, row):
                outcome = put_key(s, row, &out) if is_key else put_value(s, row, &out, &spans)
            elif is_key:
                outcome = IRREGULAR
            elif s.width:
                outcome = put_zeros(&out, s.width)
            ends[row + 1] = out.size
        free(spans.at)
    block = block_of(out.data, out.size)
    if outcome == NO_MEMORY:
        raise MemoryError(f"a column of {out.size} bytes and more")
    return None if outcome else (offsets, np.frombuffer(block, dtype=np.uint8))


def read_values(SinkPart column not None, const int64_t[::1] offsets not None, const uint8_t[::1] data not None,
                const uint8_t[::1] valid=None, bint is_key=False):
    """Append stored values, or canonical keys; false: look at each of them, and drop the column.

    Where `valid` has a zero, the row is null, and its bytes are not looked at. O(bytes).
    """
    cdef Sink *s = &column.node
    cdef int64_t row, at, start, end, rows = offsets.shape[0] - 1, size = data.shape[0]
    cdef const uint8_t *p = &data[0] if size else EMPTY
    cdef Spans spans
    cdef int outcome
    if rows < 0 or (valid is not None and valid.shape[0] != rows):
        raise UsageError("a column is not as long as its rows are many")
    memset(&spans, 0, sizeof(spans))
    with nogil:
        outcome = make_room(s, rows)
        for row in range(rows):
            if outcome:
                break
            if valid is not None and not valid[row]:
                outcome = add_null(s)
                continue
            start, end = offsets[row], offsets[row + 1]
            if not 0 <= start <= end <= size:
                outcome = IRREGULAR
            elif is_key:
                at = 0
                outcome = take_key(s, p + start, end - start, &at)
                if at != end - start:
                    outcome = IRREGULAR
            else:
                outcome = take_value(s, p + start, end - start, &spans)
        free(spans.at)
    if outcome == NO_MEMORY:
        raise MemoryError(f"a column of {size} bytes")
    return outcome == DONE
