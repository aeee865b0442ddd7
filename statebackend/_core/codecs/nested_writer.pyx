"""Arrow's buffers of nested types to stored values and canonical keys, without the GIL; see `nested_columns`."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

import numpy as np

from statebackend._core.codecs.nested_columns cimport (
    BOOL, BYTES, DECIMAL, DONE, DOUBLE, FLOAT, IRREGULAR, LIST, MAP, NOTHING, NO_MEMORY, NUMBER, RANGED, RECORD,
    STRING, WIDE_DECIMAL, Spans, block_of, canonical_double, canonical_float, copy_number, find_equal, int_at,
    is_ascii, is_below, is_set, is_signalling, is_text, open_spans, set_limits, use_large_pages)

from statebackend._core.codecs.nested_columns import FORMS
from statebackend.errors import UsageError

cdef int64_t LONGEST = 0xFFFFFFFF        # bytes of a slot, and elements of a stored list
cdef const uint8_t *EMPTY = <const uint8_t *> b""

cdef enum:
    BLOCK = 1024                         # rows whose keys are written field by field
    PAST_END = 16                        # bytes behind keys and flat records that may be written too

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
    const int32_t *sizes_32              # of list views, whose offsets only say where each begins: one of the two
    const int64_t *sizes_64
    int64_t step                         # or lists of a fixed size
    const uint8_t *data                  # of row 0; BOOL: of bit `origin`, which is row 0's
    int64_t origin
    int64_t size                         # bytes of STRING and BYTES
    int64_t low
    int64_t high                         # also the limit of a DECIMAL's magnitude
    uint64_t limit[2]                    # WIDE_DECIMAL: the power of ten that it lies below, low word first
    bint canonical
    int64_t ascii_from                   # of STRING: bytes that are known to be ASCII
    int64_t ascii_to

cdef struct Bytes:                       # grow at the end
    uint8_t *data
    int64_t size
    int64_t room


# --- bytes ---

cdef int grow_bytes(Bytes *out, int64_t more) noexcept nogil:
    cdef int64_t room = out.room + (out.room >> 1) + more + 256
    cdef uint8_t *data = <uint8_t *> realloc(out.data, room)
    if data == NULL:
        return NO_MEMORY
    out.data = data
    out.room = room
    use_large_pages(data, room)
    return DONE

cdef inline int reserve(Bytes *out, int64_t more) noexcept nogil:
    return DONE if out.room - out.size >= more else grow_bytes(out, more)

cdef inline void copy_run(uint8_t *to, const uint8_t *p, int64_t length, bint may_read_on) noexcept nogil:
    """Copy bytes: sixteen at a time, for which there is room, where as many may be read."""
    cdef int64_t at = 16
    if may_read_on and length <= 64:
        memcpy(to, p, 16)
        while at < length:
            memcpy(to + at, p + at, 16)
            at += 16
    else:
        memcpy(to, p, length)

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


# --- where a row's values lie ---

cdef inline bint is_present(const Source *s, int64_t row) noexcept nogil:
    if s.valid != NULL:
        return is_set(s.valid, s.first + row)
    return s.form != NOTHING

cdef inline bint span_of(const Source *s, int64_t row, int64_t size, int64_t *start, int64_t *length) noexcept nogil:
    """The part of the child, or of the bytes, that belongs to a row; false if it does not lie within `size`."""
    cdef int64_t end
    if s.sizes_32 != NULL or s.sizes_64 != NULL:
        return span_of_view(s, row, size, start, length)
    if s.ends_32 != NULL:
        start[0], end = s.ends_32[row], s.ends_32[row + 1]
    elif s.ends_64 != NULL:
        start[0], end = s.ends_64[row], s.ends_64[row + 1]
    else:
        start[0] = (s.origin + row) * s.step
        end = start[0] + s.step
    length[0] = end - start[0]
    return 0 <= start[0] <= end <= size

cdef bint span_of_view(const Source *s, int64_t row, int64_t size, int64_t *start, int64_t *length) noexcept nogil:
    """As `span_of`, for a list view."""
    if s.sizes_32 != NULL:
        start[0], length[0] = s.ends_32[row], s.sizes_32[row]
    else:
        start[0], length[0] = s.ends_64[row], s.sizes_64[row]
    return 0 <= start[0] <= size and 0 <= length[0] <= size - start[0]


# --- stored values ---

cdef inline bint run_of(const Source *s, int64_t row, int64_t *start, int64_t *length) noexcept nogil:
    """The text or bytes of a row; false if they are not what their type says."""
    return (span_of(s, row, s.size, start, length) and length[0] <= LONGEST
            and (s.form != STRING or (s.ascii_from <= start[0] and start[0] + length[0] <= s.ascii_to)
                 or is_text(s.data + start[0], length[0])))

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
        return put_bytes(out, s.data + start, length) if run_of(s, row, &start, &length) else IRREGULAR
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

cdef int64_t flat_bytes(const Source *s) noexcept nogil:
    """As many bytes as a record of numbers, text and bytes takes, except for its text and bytes; 0 for other types."""
    cdef int64_t i, most = (s.parts + 7) >> 3
    if s.form != RECORD:
        return 0
    for i in range(s.parts):
        if s.part[i].form != NUMBER and s.part[i].form != STRING and s.part[i].form != BYTES:
            return 0
        most += s.part[i].width if s.part[i].width else 4
    return most

cdef int put_flat(const Source *s, Bytes *out, int64_t fixed, int64_t *ends) noexcept nogil:
    """Append all rows of such records, and call nothing for most of them."""
    cdef const Source *part
    cdef int64_t row, i, start, length, bytes_of_nulls = (s.parts + 7) >> 3
    cdef uint8_t *to = out.data
    cdef uint8_t *nulls
    cdef const uint8_t *last = out.data + out.room - fixed - PAST_END
    cdef uint32_t four
    for row in range(s.rows):
        if to > last:
            return IRREGULAR             # offsets that fall somewhere, as in `put_key_run`
        nulls = to
        memset(to, 0, bytes_of_nulls if is_present(s, row) else s.width)
        to += bytes_of_nulls if is_present(s, row) else s.width
        for i in range(s.parts if is_present(s, row) else 0):
            part = s.part[i]
            if not is_present(part, row):
                nulls[i >> 3] |= <uint8_t> (1 << (i & 7))
                length = part.width if part.width else 4
                memset(to, 0, length)
                to += length
            elif part.form == NUMBER:
                copy_number(to, part.data + row * part.width, part.width)
                to += part.width
            else:
                if not run_of(part, row, &start, &length) or length > last - to:
                    return IRREGULAR
                four = <uint32_t> length
                memcpy(to, &four, 4)
                copy_run(to + 4, part.data + start, length, start + length + PAST_END <= part.size)
                to += 4 + length
        if ends != NULL:
            ends[row + 1] = to - out.data
    out.size = to - out.data
    return DONE

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


# --- canonical keys ---

cdef int64_t measure(Source *s, int64_t rows) noexcept nogil:
    """As many bytes as the canonical forms of a part take at most; -1 for offsets that do not lie within its bytes.

    On the way it looks at all text at once: if that is ASCII, each string is not examined.
    """
    cdef int64_t i, part, start, length, most = 0
    if s.form == RECORD:
        for i in range(s.parts):
            part = measure(s.part[i], rows)
            if part < 0:
                return -1
            most += rows + part
        return most
    if s.form == WIDE_DECIMAL:
        return 20 * rows
    if s.form != STRING and s.form != BYTES:
        return 8 * rows
    if rows == 0:
        return 0
    if not span_of_rows(s, rows, &start, &length):
        return -1
    s.ascii_from = s.ascii_to = start
    if s.form == STRING and is_ascii(s.data + start, length):
        s.ascii_to += length
    return 4 * rows + length

cdef inline bint span_of_rows(const Source *s, int64_t rows, int64_t *start, int64_t *length) noexcept nogil:
    """`span_of` for all rows together."""
    cdef int64_t end
    if s.ends_32 != NULL:
        start[0], end = s.ends_32[0], s.ends_32[rows]
    elif s.ends_64 != NULL:
        start[0], end = s.ends_64[0], s.ends_64[rows]
    else:
        start[0], end = s.origin * s.step, (s.origin + rows) * s.step
    length[0] = end - start[0]
    return 0 <= start[0] <= end <= s.size

cdef int64_t fixed_key_bytes(const Source *s) noexcept nogil:
    """As many bytes as the canonical form of one row takes at most, except for its text and bytes."""
    cdef int64_t i, most = 0
    if s.form != RECORD:
        return 20 if s.form == WIDE_DECIMAL else 8
    for i in range(s.parts):
        most += 1 + fixed_key_bytes(s.part[i])
    return most

cdef inline bint key_number(const Source *s, int64_t row, int form, int64_t width, int64_t *number) noexcept nogil:
    """The canonical form of a value of kind "int"; false for one that is out of range."""
    cdef uint64_t eight
    cdef uint32_t four
    cdef int32_t signed_four
    if form == BOOL:
        number[0] = is_set(s.data, s.origin + row)
    elif form == DECIMAL:
        return decimal_fits(s, s.data + row * 16, number)
    elif form == FLOAT:
        memcpy(&four, s.data + row * 4, 4)
        four = canonical_float(four)
        memcpy(&signed_four, &four, 4)
        number[0] = signed_four
    elif form == DOUBLE:
        memcpy(&eight, s.data + row * 8, 8)
        eight = canonical_double(eight)
        memcpy(number, &eight, 8)
    else:
        number[0] = int_at(s.data + row * width, width)
    return True

cdef inline int put_key_run(const Source *s, int64_t row, Bytes *out, int64_t fixed) noexcept nogil:
    """Append the text or bytes of a field, behind their number."""
    cdef int64_t start, length
    cdef uint32_t four
    # Offsets that fall somewhere need more room than the first and the last of them say.
    if not run_of(s, row, &start, &length) or out.room - out.size < length + 4 + fixed + PAST_END:
        return IRREGULAR
    four = <uint32_t> length
    memcpy(out.data + out.size, &four, 4)
    out.size += 4
    copy_run(out.data + out.size, s.data + start, length, start + length + PAST_END <= s.size)
    out.size += length
    return DONE

cdef int put_key(const Source *s, int64_t row, Bytes *out, int64_t fixed) noexcept nogil:
    """Append the canonical form of a part of a composite key, which is present, or of a whole one.

    There is room for `fixed` bytes, and PAST_END more: as many as a row takes at most, except for its text and bytes.
    """
    cdef const Source *part
    cdef int64_t i, length, number
    cdef uint32_t four
    cdef uint8_t fill
    cdef const uint8_t *p
    cdef int outcome
    if s.form == RECORD:
        for i in range(s.parts):
            part = s.part[i]
            if not is_present(part, row):
                out.data[out.size] = 0
                out.size += 1
                continue
            out.data[out.size] = 1
            out.size += 1
            if part.form == NUMBER and part.width == 8:
                memcpy(out.data + out.size, part.data + row * 8, 8)
                out.size += 8
                continue
            if part.form == STRING:
                outcome = put_key_run(part, row, out, fixed)
            else:
                outcome = put_key(part, row, out, fixed)
            if outcome:
                return outcome
        return DONE
    if s.form == STRING or s.form == BYTES:
        return put_key_run(s, row, out, fixed)
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
        memcpy(out.data + out.size, &four, 4)
        out.size += 4
        for i in range(length):
            out.data[out.size + i] = p[length - 1 - i]
        out.size += length
        return DONE
    if not key_number(s, row, s.form, s.width, &number):
        return IRREGULAR
    memcpy(out.data + out.size, &number, 8)
    out.size += 8
    return DONE

cdef bint has_fixed_keys(const Source *s) noexcept nogil:
    """Whether all keys have the same length: a record of numbers, none of which is null."""
    cdef int64_t i
    if s.form != RECORD or s.valid != NULL:
        return False
    for i in range(s.parts):
        if not NUMBER <= s.part[i].form <= DECIMAL and s.part[i].form != BOOL or s.part[i].valid != NULL:
            return False
    return True

cdef inline bint put_column_as(const Source *s, int64_t row, int64_t rows, uint8_t *to, int64_t stride, int form,
                               int64_t width) noexcept nogil:
    cdef int64_t i, number
    for i in range(row, row + rows):
        if not key_number(s, i, form, width, &number):
            return False
        to[0] = 1
        memcpy(to + 1, &number, 8)
        to += stride
    return True

cdef bint put_column(const Source *s, int64_t row, int64_t rows, uint8_t *to, int64_t stride) noexcept nogil:
    """Write one field of some rows, `stride` bytes apart. The compiler knows form and width where that pays."""
    if s.form == NUMBER and s.width == 8:
        return put_column_as(s, row, rows, to, stride, NUMBER, 8)
    if s.form == NUMBER and s.width == 4:
        return put_column_as(s, row, rows, to, stride, NUMBER, 4)
    return put_column_as(s, row, rows, to, stride, s.form, s.width)

cdef int put_fixed_keys(const Source *s, Bytes *out, int64_t *ends) noexcept nogil:
    """The canonical forms of all rows, field by field within blocks that stay in the cache."""
    cdef int64_t i, row, at = 0, rows, stride = 9 * s.parts
    while at < s.rows:
        rows = min(BLOCK, s.rows - at)
        for i in range(s.parts):
            if not put_column(s.part[i], at, rows, out.data + at * stride + 9 * i, stride):
                return IRREGULAR
        for row in range(at, at + rows):
            ends[row + 1] = (row + 1) * stride
        at += rows
    out.size = at * stride
    return DONE

cdef int put_keys(const Source *s, Bytes *out, int64_t fixed, int64_t *ends) noexcept nogil:
    cdef int64_t row
    cdef int outcome
    for row in range(s.rows):
        if not is_present(s, row) or out.room - out.size < fixed + PAST_END:
            return IRREGULAR
        outcome = put_key(s, row, out, fixed)
        if outcome:
            return outcome
        ends[row + 1] = out.size
    return DONE


# --- what Python sees ---

cdef class SourcePart:
    """Where the values of one part of a column lie, in buffers that it keeps.

    `rows` values start at element `origin` of `data`, or of `offsets`, whose numbers have 4 or 8 bytes (`is_wide`).
    Lists of a fixed `step` have no offsets; list views also have `sizes`. The bit of the first value in `valid` is
    `first`.
    """
    cdef Source node
    cdef tuple parts
    cdef list kept

    def __cinit__(self, str form not None, int64_t width, int64_t rows, *, int64_t origin=0, valid=None,
                  int64_t first=0, data=None, offsets=None, sizes=None, bint is_wide=False, int64_t step=-1,
                  low=-2**63, high=2**63 - 1, bint is_canonical=False, tuple parts=()):
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
            else:
                self.node.ends_32 = <const int32_t *> self.pointer(offsets, &size) + origin
            check_size(size, (origin + rows + (sizes is None)) * (8 if is_wide else 4))
            if sizes is not None:
                if is_wide:
                    self.node.sizes_64 = <const int64_t *> self.pointer(sizes, &size) + origin
                else:
                    self.node.sizes_32 = <const int32_t *> self.pointer(sizes, &size) + origin
                check_size(size, (origin + rows) * (8 if is_wide else 4))
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


cdef int check_size(int64_t size, int64_t needed) except -1:
    if size < needed:
        raise UsageError("a buffer of a column is shorter than its values", detail=f"{size} of {needed} bytes")
    return 0


def write_values(SourcePart column not None, bint has_offsets=True):
    """Return offsets, None if not wanted, and data of the stored values of a column; None: look at each value.

    A null row is empty; of a type of fixed width, as many zeros. O(bytes).
    """
    cdef Source *s = &column.node
    cdef int64_t row, rows = s.rows, fixed = flat_bytes(s)
    cdef Bytes out
    cdef Spans spans
    cdef int outcome = DONE
    offsets = np.zeros(rows + 1 if has_offsets else 1, dtype=np.int64)
    cdef int64_t[::1] view = offsets
    cdef int64_t *ends = &view[0] if has_offsets else NULL
    memset(&out, 0, sizeof(out))
    memset(&spans, 0, sizeof(spans))
    with nogil:
        outcome = grow_bytes(&out, max(measure(s, rows), s.width * rows) + fixed + PAST_END)
        if fixed and not outcome:
            outcome = put_flat(s, &out, fixed, ends)
        for row in range(0 if fixed else rows):
            if outcome:
                break
            if is_present(s, row):
                outcome = put_value(s, row, &out, &spans)
            elif s.width:
                outcome = put_zeros(&out, s.width)
            if ends != NULL:
                ends[row + 1] = out.size
        free(spans.at)
    block = block_of(out.data, out.size)
    if outcome == NO_MEMORY:
        raise MemoryError(f"a column of {out.size} bytes and more")
    return None if outcome else (offsets if has_offsets else None, np.frombuffer(block, dtype=np.uint8))


def write_keys(SourcePart column not None):
    """Return offsets and data of the canonical keys of a column; None: look at each key. A null is not a key.
    O(bytes)."""
    cdef Source *s = &column.node
    cdef int64_t most, fixed = fixed_key_bytes(s)
    cdef Bytes out
    cdef int outcome
    with nogil:
        most = measure(s, s.rows)
    if most < 0:
        return None
    # numpy asks the system for large pages, where there are any: new small ones take as long as the writing.
    offsets, data = np.empty(s.rows + 1, dtype=np.int64), np.empty(most + fixed + PAST_END, dtype=np.uint8)
    cdef int64_t[::1] ends = offsets
    cdef uint8_t[::1] room = data
    ends[0] = 0
    out.data, out.size, out.room = &room[0], 0, most + fixed + PAST_END
    with nogil:
        outcome = put_fixed_keys(s, &out, &ends[0]) if has_fixed_keys(s) else put_keys(s, &out, fixed, &ends[0])
    return None if outcome else (offsets, data[:out.size])
