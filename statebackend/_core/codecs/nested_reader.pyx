"""Stored values and canonical keys of nested types to Arrow's buffers, without the GIL; see `nested_columns`."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset

from statebackend._core.codecs.nested_columns cimport (
    BOOL, BYTES, DECIMAL, DONE, DOUBLE, FLOAT, IRREGULAR, LIST, MAP, NO_MEMORY, NUMBER, RANGED, RECORD, STRING,
    WIDE_DECIMAL, Spans, block_of, canonical_double, canonical_float, copy_number, find_equal, int_at, is_below,
    is_set, is_signalling, is_text, open_spans, set_limits, use_large_pages)
from statebackend._core.memory.platform cimport copy_bytes

from statebackend._core.codecs.nested_columns import FORMS
from statebackend.errors import UsageError

cdef int64_t MOST = 0x7FFFFFFF           # elements of an Arrow list, or bytes of a string column: offsets have 32 bits
cdef const uint8_t *EMPTY = <const uint8_t *> b""

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


# --- bytes ---

cdef inline uint32_t length_at(const uint8_t *p) noexcept nogil:
    cdef uint32_t length
    memcpy(&length, p, 4)
    return length


# --- what values are appended to ---

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
        use_large_pages(grown, room * s.stride)
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

cdef inline int add_run(Sink *s, const uint8_t *p, int64_t length) noexcept nogil:
    """Append a value of STRING or BYTES."""
    cdef int64_t room, size = s.size + length
    cdef uint8_t *grown
    if size > MOST or (s.form == STRING and not is_text(p, length)):
        return IRREGULAR
    if size > s.size_room:
        room = s.size_room + (s.size_room >> 1) + length + 256
        grown = <uint8_t *> realloc(s.data, room)
        if grown == NULL:
            return NO_MEMORY
        use_large_pages(grown, room)
        s.data = grown
        s.size_room = room
    if length:
        copy_bytes(<char *> s.data + s.size, <const char *> p, length)
    s.size = size
    s.count += 1
    s.ends[s.count] = <int32_t> size
    return DONE


# --- stored values ---

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
        return add_run(s, p + start, size) if s.form == STRING else take_value(s, p + start, size, spans)
    if s.canonical:
        # Two keys are the same if their bytes are. A null with other bytes than zeros breaks that.
        if not s.width and size:
            return IRREGULAR
        for i in range(size):
            if p[start + i]:
                return IRREGULAR
    return add_null(s)

cdef inline int take_record(Sink *s, const uint8_t *p, int64_t length, Spans *spans) noexcept nogil:
    cdef Sink *part
    cdef int64_t i, at = (s.parts + 7) >> 3
    cdef int outcome
    if length < at or (s.canonical and s.parts & 7 and p[at - 1] >> (s.parts & 7)):
        return IRREGULAR
    for i in range(s.parts):
        part = s.part[i]
        if part.form == NUMBER and part.width <= length - at and not is_set(p, i):
            copy_number(part.data + part.count * part.stride, p + at, part.stride)
            part.count += 1
            at += part.width
            continue
        outcome = take_slot(part, p, length, &at, is_set(p, i), spans)
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


# --- canonical keys ---

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


def read_values(SinkPart column not None, const int64_t[::1] offsets, const uint8_t[::1] data not None,
                const uint8_t[::1] valid=None, bint is_key=False):
    """Append stored values, or canonical keys; false: look at each of them, and drop the column.

    Without `offsets`, the type has a fixed width. Where `valid` has a zero, the row is null, and its bytes are not
    looked at. O(bytes).
    """
    cdef Sink *s = &column.node
    cdef int64_t row, at, start = 0, end = 0, size = data.shape[0], rows
    cdef const int64_t *ends = NULL
    cdef const uint8_t *p = &data[0] if size else EMPTY
    cdef Spans spans
    cdef int outcome
    if offsets is not None:
        rows = offsets.shape[0] - 1
        ends = &offsets[0] if rows >= 0 else NULL
    else:
        rows = size // s.width if s.width else -1
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
            if ends != NULL:
                start, end = ends[row], ends[row + 1]
            else:
                start, end = row * s.width, (row + 1) * s.width
            if not 0 <= start <= end <= size:
                outcome = IRREGULAR
            elif is_key:
                at = 0
                outcome = take_key(s, p + start, end - start, &at)
                if at != end - start:
                    outcome = IRREGULAR
            elif s.form == RECORD:       # as `take_value` does, in this loop
                outcome = take_record(s, p + start, end - start, &spans)
            else:
                outcome = take_value(s, p + start, end - start, &spans)
        free(spans.at)
    if outcome == NO_MEMORY:
        raise MemoryError(f"a column of {size} bytes")
    return outcome == DONE
