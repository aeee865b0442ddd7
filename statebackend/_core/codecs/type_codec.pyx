"""The compiled form of declared types; `type_codec.pxd` explains it."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.datetime cimport (
    PyDate_CheckExact, PyDateTime_CheckExact, date_day, date_month, date_new, date_year, datetime_day, datetime_hour,
    datetime_microsecond, datetime_minute, datetime_month, datetime_new, datetime_second, datetime_tzinfo,
    datetime_year, get_utc, import_datetime, timedelta, timedelta_days, timedelta_microseconds, timedelta_seconds)
from cpython.dict cimport PyDict_Next, PyDict_Size
from cpython.float cimport PyFloat_AS_DOUBLE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.math cimport INFINITY
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from statebackend._core.codecs cimport decimals
from statebackend._core.codecs.decimals cimport decimal_from_int, decimal_to_int, int128
from statebackend._core.memory.interpreter cimport (
    PyBytes_CheckExact, PyDict_CheckExact, PyDict_GetItemWithError, PyErr_Clear, PyFloat_CheckExact,
    PyList_CheckExact, PyLong_CheckExact, PyTuple_Check, PyTuple_CheckExact, PyUnicode_AsUTF8AndSize,
    PyUnicode_CheckExact, PyUnicode_DecodeUTF8, Py_DECREF, Py_False, Py_INCREF, Py_True)
from statebackend._core.memory.platform cimport hash_bytes, likely, unlikely
from statebackend._core.tables.values cimport (
    TYPE_BOOL, TYPE_BYTE, TYPE_BYTES, TYPE_DATE, TYPE_DECIMAL, TYPE_DOUBLE, TYPE_FLOAT, TYPE_LIST, TYPE_LONG_DECIMAL,
    TYPE_MAP, TYPE_OTHER, TYPE_RECORD, TYPE_STRING, TYPE_TIMESTAMP, TYPE_TIMESTAMP_NTZ, goes_as_tuple, is_integer,
    long_as_int64, stands_for_integer)

import dataclasses
from decimal import Decimal

from statebackend.errors import SerializationError, UsageError
from statebackend.types.layout import LAYOUTS

cdef extern from "Python.h":
    int PyDict_SetItem(object dict, object key, object value) except -1
    void PyTuple_SET_ITEM(PyObject *o, Py_ssize_t i, PyObject *value)
    PyObject **PySequence_Fast_ITEMS(object o) noexcept
    int PyObject_GenericSetAttr(object o, object name, object value) except -1

cdef extern from *:
    """
    static inline PyObject *sb_new_tuple(PyObject *cls, Py_ssize_t n) {
        return ((PyTypeObject *)cls)->tp_alloc((PyTypeObject *)cls, n);
    }
    #ifdef Py_GIL_DISABLED
    #define SB_ONE_AT_A_TIME 0
    #else
    #define SB_ONE_AT_A_TIME 1
    #endif
    /* Whether an object is the text of these ASCII characters. */
    static inline int sb_is_text(PyObject *o, const char *data, Py_ssize_t size) {
        return PyUnicode_CheckExact(o) && PyUnicode_IS_COMPACT_ASCII(o) && PyUnicode_GET_LENGTH(o) == size
            && sb_same_bytes(PyUnicode_1BYTE_DATA(o), data, (uint64_t)size);
    }
    static inline PyObject *sb_new_object(PyObject *cls, PyObject *nothing) {
        return PyBaseObject_Type.tp_new((PyTypeObject *)cls, nothing, NULL);
    }
    """
    PyObject *new_tuple "sb_new_tuple"(object cls, Py_ssize_t n) except NULL
    object new_object "sb_new_object"(object cls, object nothing)
    const bint ONE_AT_A_TIME "SB_ONE_AT_A_TIME"
    bint is_text "sb_is_text"(PyObject *o, const char *data, Py_ssize_t size) noexcept

import_datetime()

cdef enum:
    MAX_BYTES = 0x7FFFFFFF               # of one value, as in an entry
    MAX_FIELDS_HERE = 16                 # of a record that is read without separate memory
    TEXTS = 64                           # keys of maps that are kept
    LONGEST_TEXT = 32                    # bytes of such a key

cdef int64_t MICROSECONDS = 86_400_000_000       # of a day
cdef int64_t EXACT = <int64_t>1 << 53            # a double holds every integer up to here
cdef int64_t TWO_32 = <int64_t>1 << 32
cdef double CANONICAL_NAN = float("nan")
cdef object UTC = get_utc()

DAMAGED = object()

cdef dict KINDS = {name: row.code for name, row in LAYOUTS.items()}


# --- room ------------------------------------------------------------------------------------------------------

cdef void close_room(Room *room) noexcept:
    if room.data != room.first:
        free(room.data)


cdef char *take_room(Room *room, uint64_t n) except NULL:
    """The next `n` bytes."""
    cdef uint64_t wanted = room.used + n
    cdef uint64_t capacity
    cdef char *data
    if unlikely(wanted > room.capacity):
        capacity = max(2 * room.capacity, wanted)
        data = <char *>(malloc(capacity) if room.data == room.first else realloc(room.data, capacity))
        if data == NULL:
            raise MemoryError(f"no memory to serialise a value of {capacity} bytes")
        if room.data == room.first:
            memcpy(data, room.first, room.used)
        room.data, room.capacity = data, capacity
    data = room.data + room.used
    room.used = wanted
    return data


# --- dates -----------------------------------------------------------------------------------------------------

cdef inline int64_t days_of(int64_t year, int64_t month, int64_t day) noexcept nogil:
    """Days from 1970-01-01 to a date of the Gregorian calendar; years begin in March here, leap days end them."""
    cdef int64_t since_march = month - 3 if month > 2 else month + 9
    cdef int64_t full = year if month > 2 else year - 1
    return 365 * full + full // 4 - full // 100 + full // 400 + (153 * since_march + 2) // 5 + day - 719_469


cdef inline bint date_of(int64_t days, int *year, int *month, int *day) noexcept nogil:
    """The date; False outside the years 1 to 9999."""
    cdef int64_t shifted = days + 719_468, era, of_era, years, of_year, since_march
    if days < -719_162 or days > 2_932_896:
        return False
    era = shifted // 146_097
    of_era = shifted - era * 146_097
    years = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * years + years // 4 - years // 100)
    since_march = (5 * of_year + 2) // 153
    day[0] = <int>(of_year - (153 * since_march + 2) // 5 + 1)
    month[0] = <int>(since_march + 3 if since_march < 10 else since_march - 9)
    year[0] = <int>(years + era * 400 + (1 if month[0] <= 2 else 0))
    return True


cdef inline int64_t microseconds_of(object value) noexcept:
    """Microseconds from 1970-01-01 for a datetime's fields."""
    return (days_of(datetime_year(value), datetime_month(value), datetime_day(value)) * MICROSECONDS
            + (datetime_hour(value) * <int64_t>3_600 + datetime_minute(value) * 60 + datetime_second(value)) * 1_000_000
            + datetime_microsecond(value))


cdef object datetime_of(int64_t number, object zone):
    cdef int64_t days = number // MICROSECONDS, rest
    cdef int year = 0, month = 0, day = 0
    rest = number - days * MICROSECONDS
    if rest < 0:                         # C divides towards zero
        days -= 1
        rest += MICROSECONDS
    if not date_of(days, &year, &month, &day):
        return DAMAGED
    return datetime_new(year, month, day, <int>(rest // 3_600_000_000), <int>(rest // 60_000_000 % 60),
                        <int>(rest // 1_000_000 % 60), <int>(rest % 1_000_000), zone)


cdef int write_big_endian(int128 number, Room *room) except -1:
    """Append the shortest two's complement, with room for a sign bit, as Java's BigInteger does."""
    cdef uint8_t bytes[16]
    cdef int i, first = 0
    for i in range(16):
        bytes[15 - i] = <uint8_t>(number >> (8 * i))
    while first < 15 and ((bytes[first] == 0 and bytes[first + 1] < 128)
                          or (bytes[first] == 255 and bytes[first + 1] >= 128)):
        first += 1
    memcpy(take_room(room, 16 - first), bytes + first, 16 - first)
    return 1


cdef object record_from(TypeCodec codec, PyObject **fields, Py_ssize_t n):
    cdef object record
    cdef Py_ssize_t i
    cdef object cls = codec.record_class if codec.is_tuple and codec.record_class is not None else tuple
    cdef PyObject *made = new_tuple(cls, n)
    for i in range(n):
        Py_INCREF(fields[i])
        PyTuple_SET_ITEM(made, i, fields[i])
    record = <object>made
    Py_DECREF(made)
    return record if codec.is_tuple else codec.record_of(record)


# --- the codec -------------------------------------------------------------------------------------------------

@cython.final
cdef class TypeCodec:
    """The codec of a type: its name, its serializer, the codecs of its parts, and the other needs of the kind.

    A record has `names` if it is a ROW, and the class in which it comes back; `is_key` is for types with one zero
    and one NaN.

    >>> from statebackend.types.serializers import serializer_for
    >>> codec = TypeCodec("LONG", serializer_for("bigint"))
    >>> codec.encode(7), codec.encode("7"), codec.decode(codec.encode(7))
    (b'\\x07\\x00\\x00\\x00\\x00\\x00\\x00\\x00', None, 7)
    """

    def __init__(self, str name not None, serializer, tuple parts=(), *, tuple names=None, record_class=None,
                 reader=None, int precision=0, int scale=0, bint is_key=False):
        self.serializer, self.parts, self.is_key = serializer, parts, is_key
        self.precision, self.scale = precision, scale
        self.names, self.record_class, self.reader = names, record_class, reader
        self.is_tuple = record_class is None or issubclass(record_class, tuple)
        if name == "DECIMAL" and decimals.tried:
            self.kind, self.width = (TYPE_DECIMAL, 8) if precision <= 18 else (TYPE_LONG_DECIMAL, 16)
        else:
            self.kind, self.width = KINDS.get(name, TYPE_OTHER), serializer.fixed_width or 0
        self.is_fixed = self.width > 0 or (self.kind == TYPE_OTHER and serializer.fixed_width is not None)
        if is_integer(self.kind):
            self.high = (<int64_t>1 << (8 * self.width - 2)) - 1 + (<int64_t>1 << (8 * self.width - 2))
            self.low = -self.high - 1
        if self.kind == TYPE_MAP:
            self.may_repeat = (<TypeCodec?>parts[0]).kind in (TYPE_DOUBLE, TYPE_FLOAT, TYPE_TIMESTAMP, TYPE_RECORD)
            if ONE_AT_A_TIME and (<TypeCodec>parts[0]).kind == TYPE_STRING:
                self.texts = [None] * TEXTS
        if self.kind == TYPE_RECORD and len(parts) > 0xFFFF:
            raise UsageError("a record has too many fields", detail=f"{len(parts)}")

    @property
    def is_compiled(self):
        return self.kind != TYPE_OTHER

    def encode(self, value):
        """The serializer's bytes of a value; None if only the serializer can tell."""
        cdef Room room
        open_room(&room)
        try:
            if not self.write(value, &room, True):
                return None
            return PyBytes_FromStringAndSize(room.data, room.used)
        finally:
            close_room(&room)

    def decode(self, bytes data not None):
        """The value of a serializer's bytes; raises ValueError for bytes that only the serializer can explain."""
        cdef object value = self.read(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        if value is DAMAGED:
            raise ValueError("these are no bytes of the type, or its serializer must read them")
        return value

    def encode_key(self, key):
        """The canonical form of a key, an int or bytes; None if only the encoder can tell.

        >>> from statebackend.types.serializers import serializer_for
        >>> TypeCodec("DATE", serializer_for("date")).encode_key(__import__("datetime").date(1970, 1, 2))
        1
        """
        cdef Room room
        cdef int64_t number
        if self.kind <= TYPE_DECIMAL:
            return number if self.key_number(key, &number) else None
        open_room(&room)
        try:
            return PyBytes_FromStringAndSize(room.data, room.used) if self.write_key(key, &room) else None
        finally:
            close_room(&room)

    def encode_keys(self, list keys not None, int64_t[::1] ends not None):
        """The canonical forms of many composite keys, one behind the other; `ends` gets where each begins and ends.

        None if there is a key that only the encoder can judge.

        >>> import numpy as np
        >>> from statebackend.types.serializers import serializer_for
        >>> parts, ends = (TypeCodec("BYTE", serializer_for("tinyint")),), np.zeros(3, np.int64)
        >>> codec = TypeCodec("TUPLE", serializer_for("struct<a:tinyint>"), parts)
        >>> codec.encode_keys([(7,), (None,)], ends).hex(" "), ends.tolist()
        ('01 07 00 00 00 00 00 00 00 00', [0, 9, 10])
        """
        cdef Room room
        cdef Py_ssize_t i
        if self.kind != TYPE_RECORD or ends.shape[0] != len(keys) + 1:
            raise UsageError("there must be a place for each composite key, and one more")
        open_room(&room)
        try:
            ends[0] = 0
            for i in range(ends.shape[0] - 1):
                # A property of a dataclass may have cut the list.
                if i >= PyList_GET_SIZE(keys) or not self.write_key(<object>PyList_GET_ITEM(keys, i), &room):
                    return None
                ends[i + 1] = room.used
            return PyBytes_FromStringAndSize(room.data, room.used)
        finally:
            close_room(&room)

    def decode_key(self, canonical):
        """The key of a canonical form; raises ValueError for one that only the encoder can explain."""
        cdef uint64_t at = 0
        cdef object key
        if self.kind <= TYPE_DECIMAL:
            key = self.from_key_number(canonical)
        else:
            at = PyBytes_GET_SIZE(<bytes?>canonical)
            key = self.key_of(PyBytes_AS_STRING(canonical), at)
        if key is DAMAGED:
            raise ValueError("this is no canonical form of the type, or its encoder must read it")
        return key

    # --- columns of plain values ---

    def values_of(self, const int64_t[::1] numbers not None, const uint8_t[::1] nulls=None):
        """The values of dates, timestamps and decimals, given as integers (long decimals: as two); None where `nulls`.

        Raises OverflowError for a number outside of Python's values.

        >>> import numpy as np
        >>> from statebackend.types.serializers import serializer_for
        >>> TypeCodec("DATE", serializer_for("date")).values_of(np.array([1, 2]), np.array([0, 1], np.uint8))
        [datetime.date(1970, 1, 2), None]
        """
        cdef Py_ssize_t i, words = 2 if self.kind == TYPE_LONG_DECIMAL else 1
        cdef list values = []
        cdef object value
        cdef int128 whole
        if not stands_for_integer(self.kind) and self.kind != TYPE_LONG_DECIMAL:
            raise UsageError("values of this kind do not come from integers")
        if numbers.shape[0] % words or (nulls is not None and nulls.shape[0] != numbers.shape[0] // words):
            raise UsageError("there must be a number, and what tells nulls, for each value")
        for i in range(numbers.shape[0] // words):
            if nulls is not None and nulls[i]:
                values.append(None)
                continue
            if words == 1:
                value = self.from_integer(numbers[i])
            else:
                whole = <int128>numbers[2 * i + 1] * <int128>TWO_32 * TWO_32 + <uint64_t>numbers[2 * i]
                value = decimal_from_int(whole, self.scale)
                if value is None:
                    value = DAMAGED
            if value is DAMAGED:
                raise OverflowError("a number is beyond what Python has for the type")
            values.append(value)
        return values

    def numbers_of(self, list values not None, int64_t[::1] numbers not None, uint8_t[::1] nulls not None):
        """Write the integers of values, and which are None; False if there is one that only the serializer can judge.

        >>> import numpy as np
        >>> from statebackend.types.serializers import serializer_for
        >>> numbers, nulls = np.zeros(2, np.int64), np.zeros(2, np.uint8)
        >>> TypeCodec("BOOL", serializer_for("boolean")).numbers_of([True, None], numbers, nulls), numbers, nulls
        (True, array([1, 0]), array([0, 1], dtype=uint8))
        """
        cdef Py_ssize_t i
        cdef object value
        if not stands_for_integer(self.kind):
            raise UsageError("values of this kind do not become integers")
        if numbers.shape[0] != len(values) or nulls.shape[0] != len(values):
            raise UsageError("there must be a place for each value")
        for i in range(numbers.shape[0]):
            if i >= PyList_GET_SIZE(values):     # a custom time zone may have cut the list
                return False
            value = <object>PyList_GET_ITEM(values, i)
            nulls[i] = value is None
            if value is not None and not self.integer_of(value, &numbers[i], True):
                return False
        return True

    # --- writing ---

    cdef int write(self, object value, Room *room, bint runs_python) except -1:
        """Append a value's bytes. Where the answer is 0 some may have been appended."""
        cdef Py_ssize_t length
        cdef const char *data
        cdef bytes serialized
        if self.kind <= TYPE_LONG_DECIMAL:
            return self.write_number(value, room, runs_python)
        if self.kind == TYPE_STRING:
            if not PyUnicode_CheckExact(value):
                return 0
            data = PyUnicode_AsUTF8AndSize(value, &length)
            if unlikely(data == NULL):
                PyErr_Clear()            # a lone surrogate
                return 0
        elif self.kind == TYPE_BYTES:
            if not PyBytes_CheckExact(value):
                return 0
            data, length = PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)
        elif self.kind == TYPE_RECORD:
            return self.write_record(value, room, runs_python)
        elif self.kind == TYPE_LIST:
            return self.write_list(value, room, runs_python)
        elif self.kind == TYPE_MAP:
            return self.write_map(value, room, runs_python)
        else:
            if not runs_python:
                return 0
            try:
                serialized = self.serializer.serialize(value)
            except (SerializationError, OverflowError):
                return 0                 # raised again, with the place of the value in the whole
            data, length = PyBytes_AS_STRING(serialized), PyBytes_GET_SIZE(serialized)
            if self.is_fixed and <uint64_t>length != self.width:
                return 0
        if unlikely(length > MAX_BYTES):
            return 0
        memcpy(take_room(room, length), data, length)
        return 1

    cdef int write_slot(self, object value, Room *room, bint runs_python) except -1:
        """Append a part: its bytes, behind their number where that varies."""
        cdef uint64_t begin = room.used
        cdef uint32_t length
        if self.is_fixed:
            return self.write(value, room, runs_python)
        take_room(room, 4)
        if not self.write(value, room, runs_python) or room.used - begin - 4 > MAX_BYTES:
            return 0
        length = <uint32_t>(room.used - begin - 4)
        memcpy(room.data + begin, &length, 4)
        return 1

    cdef int write_null(self, Room *room) except -1:
        cdef uint32_t width = self.width if self.is_fixed else 4
        memset(take_room(room, width), 0, width)
        return 0

    cdef int write_number(self, object value, Room *room, bint runs_python) except -1:
        cdef int64_t number
        cdef double real
        cdef float single
        cdef int128 long_number
        cdef char *out
        if likely(stands_for_integer(self.kind)):
            if not self.integer_of(value, &number, runs_python):
                return 0
            memcpy(take_room(room, self.width), &number, self.width)     # little-endian, so the low bytes
            return 1
        if self.kind == TYPE_LONG_DECIMAL:
            if type(value) is not Decimal or not decimal_to_int(value, self.precision, self.scale, &long_number):
                return 0
            memcpy(take_room(room, 16), &long_number, 16)
            return 1
        if not self.real_of(value, &real):
            return 0
        if self.is_key:
            real = real + 0.0 if real == real else CANONICAL_NAN         # -0.0 + 0.0 is 0.0
        out = take_room(room, self.width)
        if likely(self.kind == TYPE_DOUBLE):
            memcpy(out, &real, 8)
        else:
            single = <float>real
            memcpy(out, &single, 4)
        return 1

    cdef int integer_of(self, object value, int64_t *number, bint runs_python) except -1:
        """The integer that represents a value, of a type from TYPE_LONG to TYPE_DECIMAL."""
        cdef int128 long_number
        cdef object offset
        cdef int kind = self.kind
        if kind <= TYPE_BYTE:
            return PyLong_CheckExact(value) and long_as_int64(value, number) and self.low <= number[0] <= self.high
        if kind == TYPE_BOOL:
            number[0] = <PyObject *>value == Py_True
            return <PyObject *>value == Py_True or <PyObject *>value == Py_False
        if kind == TYPE_DECIMAL:
            if type(value) is not Decimal or not decimal_to_int(value, self.precision, self.scale, &long_number):
                return 0
            number[0] = <int64_t>long_number
            return 1
        if kind == TYPE_DATE:
            if not PyDate_CheckExact(value):
                return 0
            number[0] = days_of(date_year(value), date_month(value), date_day(value))
            return 1
        if not PyDateTime_CheckExact(value):
            return 0
        offset = datetime_tzinfo(value)
        number[0] = microseconds_of(value)
        if kind == TYPE_TIMESTAMP_NTZ:
            return offset is None
        if offset is UTC:
            return 1
        if offset is None or not runs_python:
            return 0
        offset = value.utcoffset()
        if not isinstance(offset, timedelta):
            return 0
        number[0] -= ((timedelta_days(offset) * <int64_t>86_400 + timedelta_seconds(offset)) * 1_000_000
                      + timedelta_microseconds(offset))
        return 1

    cdef int real_of(self, object value, double *number) noexcept:
        cdef int64_t whole
        if PyFloat_CheckExact(value):
            number[0] = PyFloat_AS_DOUBLE(value)
        elif (self.kind == TYPE_DOUBLE and PyLong_CheckExact(value) and long_as_int64(value, &whole)
                and -EXACT <= whole <= EXACT):
            number[0] = <double>whole
        else:
            return 0
        if self.kind == TYPE_FLOAT:
            # A number that rounds to infinity is out of range.
            return (<double><float>number[0] - <double><float>number[0] == 0 or number[0] != number[0]
                    or number[0] == INFINITY or number[0] == -INFINITY)
        return 1

    cdef int takes(self, object value, bint runs_python) except -1:
        """Return 1 if a value has the form of the record: a tuple by position, a dict or a dataclass by name."""
        cdef Py_ssize_t n = PyTuple_GET_SIZE(self.parts), at = 0
        cdef PyObject *key
        cdef PyObject *item
        if PyTuple_Check(value):
            return PyTuple_GET_SIZE(value) == n and goes_as_tuple(value)
        if self.names is None:
            return 0
        if PyDict_CheckExact(value):
            if PyDict_Size(value) != n:
                return 0
            while PyDict_Next(value, &at, &key, &item):
                if not PyUnicode_CheckExact(<object>key):
                    return 0             # comparing it may run anything
            return 1
        if not runs_python:
            return 0
        if type(value) is self.taken:
            return 1
        if not dataclasses.is_dataclass(value) or self.reader(value) is None:
            return 0
        self.taken = type(value)
        return 1

    cdef object field_of(self, object value, Py_ssize_t i, bint runs_python):
        """Field `i` of a record that `takes` took; DAMAGED if a dict has none of that name."""
        cdef PyObject *item
        if PyTuple_Check(value):
            return <object>PyTuple_GET_ITEM(value, i)
        if PyDict_CheckExact(value):
            item = PyDict_GetItemWithError(value, <object>PyTuple_GET_ITEM(self.names, i))
            return DAMAGED if item == NULL else <object>item
        return getattr(value, <object>PyTuple_GET_ITEM(self.names, i))

    cdef int write_record(self, object value, Room *room, bint runs_python) except -1:
        cdef Py_ssize_t n = PyTuple_GET_SIZE(self.parts), i
        cdef uint64_t bitmap = room.used
        cdef TypeCodec part
        cdef object field
        if not self.takes(value, runs_python):
            return 0
        memset(take_room(room, (n + 7) // 8), 0, (n + 7) // 8)
        for i in range(n):
            field = self.field_of(value, i, runs_python)
            if field is DAMAGED:
                return 0
            part = <TypeCodec>PyTuple_GET_ITEM(self.parts, i)
            if field is None:
                room.data[bitmap + i // 8] |= 1 << (i % 8)
                part.write_null(room)
            elif not part.write_slot(field, room, runs_python):
                return 0
        return 1

    cdef int write_list(self, object value, Room *room, bint runs_python) except -1:
        cdef Py_ssize_t n, i
        cdef uint64_t bitmap
        cdef uint32_t count
        cdef TypeCodec part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 0)
        cdef object element
        cdef bint is_list = PyList_CheckExact(value)
        if not is_list and not PyTuple_CheckExact(value):
            return 0
        n = PyList_GET_SIZE(value) if is_list else PyTuple_GET_SIZE(value)
        if n > MAX_BYTES:
            return 0
        count = <uint32_t>n
        memcpy(take_room(room, 4), &count, 4)
        bitmap = room.used
        memset(take_room(room, (n + 7) // 8), 0, (n + 7) // 8)
        for i in range(n):
            if is_list:
                if i >= PyList_GET_SIZE(value):      # an element's serializer may have cut it
                    return 0
                element = <object>PyList_GET_ITEM(value, i)
            else:
                element = <object>PyTuple_GET_ITEM(value, i)
            if element is None:
                room.data[bitmap + i // 8] |= 1 << (i % 8)
                part.write_null(room)
            elif not part.write_slot(element, room, runs_python):
                return 0
        return not is_list or PyList_GET_SIZE(value) == n

    cdef int write_map(self, object value, Room *room, bint runs_python) except -1:
        cdef Py_ssize_t n, at = 0, i = 0
        cdef uint64_t bitmap, begin
        cdef uint32_t count
        cdef TypeCodec key_part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 0)
        cdef TypeCodec item_part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 1)
        cdef PyObject *key_here
        cdef PyObject *item_here
        cdef object key, item, slots = None
        if not PyDict_CheckExact(value):
            return 0
        if runs_python:
            value = value.copy()         # Python could change it on the way
        n = PyDict_Size(value)
        if self.may_repeat and key_part.kind != TYPE_DOUBLE and n > 1:
            if runs_python:
                slots = set()
            elif key_part.kind != TYPE_TIMESTAMP:    # those that need no Python are of one zone
                return 0
        if n > MAX_BYTES:
            return 0
        count = <uint32_t>n
        memcpy(take_room(room, 4), &count, 4)
        bitmap = room.used
        memset(take_room(room, (n + 7) // 8), 0, (n + 7) // 8)
        while PyDict_Next(value, &at, &key_here, &item_here):
            key, item = <object>key_here, <object>item_here
            if (self.may_repeat and key_part.kind == TYPE_DOUBLE and PyFloat_CheckExact(key)
                    and PyFloat_AS_DOUBLE(key) != PyFloat_AS_DOUBLE(key)):
                return 0                 # another one may come
            begin = room.used
            if key is None or not key_part.write_slot(key, room, runs_python):
                return 0
            if slots is not None:
                slots.add(PyBytes_FromStringAndSize(room.data + begin, room.used - begin))
            if item is None:
                room.data[bitmap + i // 8] |= 1 << (i % 8)
                item_part.write_null(room)
            elif not item_part.write_slot(item, room, runs_python):
                return 0
            i += 1
        return slots is None or len(slots) == n      # otherwise the last of equal keys wins

    # --- reading ---

    cdef object read(self, const char *data, uint64_t length):
        """The value of these bytes, which must stay where they are; DAMAGED if the serializer must look at them."""
        cdef int64_t number = 0
        cdef int32_t of_four
        cdef int16_t of_two
        cdef int128 long_number
        cdef double real
        cdef float single
        cdef int kind = self.kind
        if self.is_fixed and length != self.width:
            return DAMAGED
        if stands_for_integer(kind):
            if self.width == 8:
                memcpy(&number, data, 8)
            elif self.width == 4:
                memcpy(&of_four, data, 4)        # at any address
                number = of_four
            elif self.width == 2:
                memcpy(&of_two, data, 2)
                number = of_two
            else:
                number = (<const int8_t *>data)[0]
            return self.from_integer(number)
        if kind == TYPE_STRING:
            try:
                return PyUnicode_DecodeUTF8(data, length, NULL)
            except UnicodeDecodeError:
                return DAMAGED
        if kind == TYPE_RECORD:
            return self.read_record(data, length)
        if kind == TYPE_LIST:
            return self.read_list(data, length)
        if kind == TYPE_MAP:
            return self.read_map(data, length)
        if kind == TYPE_BYTES:
            return PyBytes_FromStringAndSize(data, length)
        if kind == TYPE_DOUBLE:
            memcpy(&real, data, 8)
            return real
        if kind == TYPE_FLOAT:
            memcpy(&single, data, 4)
            return <double>single
        if kind == TYPE_LONG_DECIMAL:
            memcpy(&long_number, data, 16)
            value = decimal_from_int(long_number, self.scale)
            return DAMAGED if value is None else value
        try:
            return self.serializer.deserialize(PyBytes_FromStringAndSize(data, length))
        except SerializationError:
            return DAMAGED

    cdef object from_integer(self, int64_t number):
        cdef int year = 0, month = 0, day = 0
        cdef int kind = self.kind
        if kind <= TYPE_BYTE:
            return number
        if kind == TYPE_TIMESTAMP:
            return datetime_of(number, UTC)
        if kind == TYPE_TIMESTAMP_NTZ:
            return datetime_of(number, None)
        if kind == TYPE_DECIMAL:
            return decimal_from_int(number, self.scale)
        if kind == TYPE_DATE:
            return date_new(year, month, day) if date_of(number, &year, &month, &day) else DAMAGED
        return DAMAGED if number & ~<int64_t>1 else number == 1

    cdef object read_slot(self, const char *data, uint64_t length, uint64_t *at, bint is_null):
        """The part at `at`, which moves to the next one."""
        cdef uint32_t width = self.width
        cdef uint64_t begin = at[0]
        if not self.is_fixed:
            if length - begin < 4:
                return DAMAGED
            memcpy(&width, data + begin, 4)
            begin += 4
        if length - begin < width:
            return DAMAGED
        at[0] = begin + width
        return None if is_null else self.read(data + begin, width)

    cdef object record_of(self, object fields):
        """The dataclass with these fields, made as unpickling does."""
        cdef object record
        cdef Py_ssize_t i
        if self.is_made:
            record = new_object(self.record_class, ())
        else:
            record = object.__new__(self.record_class)      # which refuses classes of exceptions, dicts and the like
            self.is_made = True
        for i in range(PyTuple_GET_SIZE(self.names)):
            PyObject_GenericSetAttr(record, <object>PyTuple_GET_ITEM(self.names, i),
                                    <object>PyTuple_GET_ITEM(fields, i))
        return record

    cdef object read_record(self, const char *data, uint64_t length):
        cdef Py_ssize_t n = PyTuple_GET_SIZE(self.parts), i = 0, made = 0
        cdef uint64_t at = (n + 7) // 8
        cdef PyObject *few[MAX_FIELDS_HERE]
        cdef PyObject **fields = few
        cdef object field
        if length < at:
            return DAMAGED
        if n > MAX_FIELDS_HERE:
            fields = <PyObject **>malloc(n * sizeof(PyObject *))
            if fields == NULL:
                raise MemoryError("no memory for the fields of a record")
        # The fields first: a record must not be visible without them.
        try:
            while made < n:
                field = (<TypeCodec>PyTuple_GET_ITEM(self.parts, made)).read_slot(
                    data, length, &at, data[made // 8] >> (made % 8) & 1)
                if field is DAMAGED:
                    return DAMAGED
                Py_INCREF(<PyObject *>field)
                fields[made] = <PyObject *>field
                made += 1
            if at != length:
                return DAMAGED
            return record_from(self, fields, n)
        finally:
            for i in range(made):
                Py_DECREF(fields[i])
            if fields != few:
                free(fields)

    cdef object read_list(self, const char *data, uint64_t length):
        cdef uint32_t n, i
        cdef uint64_t at, bitmap = 4
        cdef TypeCodec part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 0)
        cdef list elements = []
        cdef object element
        if length < 4:
            return DAMAGED
        memcpy(&n, data, 4)
        at = 4 + (<uint64_t>n + 7) // 8
        if at > length:
            return DAMAGED
        for i in range(n):
            element = part.read_slot(data, length, &at, data[bitmap + i // 8] >> (i % 8) & 1)
            if element is DAMAGED:
                return DAMAGED
            elements.append(element)
        return elements if at == length else DAMAGED

    cdef object read_map(self, const char *data, uint64_t length):
        cdef uint32_t n, i
        cdef uint64_t at, bitmap = 4
        cdef TypeCodec key_part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 0)
        cdef TypeCodec item_part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 1)
        cdef dict found = {}
        cdef object key, item
        if length < 4:
            return DAMAGED
        memcpy(&n, data, 4)
        at = 4 + (<uint64_t>n + 7) // 8
        if at > length:
            return DAMAGED
        for i in range(n):
            if self.texts is not None:
                key = self.read_text(data, length, &at)
            else:
                key = key_part.read_slot(data, length, &at, False)
            if key is DAMAGED:
                return DAMAGED
            item = item_part.read_slot(data, length, &at, data[bitmap + i // 8] >> (i % 8) & 1)
            if item is DAMAGED:
                return DAMAGED
            PyDict_SetItem(found, key, item)
        return found if at == length else DAMAGED

    cdef object read_text(self, const char *data, uint64_t length, uint64_t *at):
        """As `read_slot` of a text. Most maps have the keys of others: one object, whose hash is known, serves all."""
        cdef TypeCodec part = <TypeCodec>PyTuple_GET_ITEM(self.parts, 0)
        cdef const char *begin = data + at[0] + 4
        cdef uint32_t width, place
        cdef object made
        if length - at[0] < 4:
            return DAMAGED
        memcpy(&width, begin - 4, 4)
        if width > LONGEST_TEXT or length - at[0] - 4 < width:
            return part.read_slot(data, length, at, False)
        place = hash_bytes(<const unsigned char *>begin, width, 0) % TEXTS
        at[0] += 4 + width
        made = <object>PyList_GET_ITEM(self.texts, place)
        if likely(is_text(<PyObject *>made, begin, width)):
            return made
        made = part.read(begin, width)
        if made is not DAMAGED:
            self.texts[place] = made
        return made

    # --- keys ---

    cdef int key_number(self, object value, int64_t *number) except -1:
        cdef double real
        cdef float single
        cdef int32_t bits
        if stands_for_integer(self.kind):
            return self.integer_of(value, number, True)
        if self.kind > TYPE_FLOAT or not self.real_of(value, &real):
            return 0
        real = real + 0.0
        if self.kind == TYPE_DOUBLE:
            memcpy(number, &real, 8)
            if real != real:
                number[0] = 0x7FF8000000000000
            return 1
        single = <float>real
        memcpy(&bits, &single, 4)
        number[0] = bits if real == real else 0x7FC00000
        return 1

    cdef int write_key(self, object value, Room *room) except -1:
        """Append the canonical form of a key of kind "bytes", as `keys.encoders` describes it."""
        cdef Py_ssize_t n, i
        cdef int64_t number
        cdef uint64_t begin
        cdef uint32_t length
        cdef TypeCodec part
        cdef object field
        cdef int128 long_number
        if self.kind == TYPE_LONG_DECIMAL:
            if type(value) is not Decimal or not decimal_to_int(value, self.precision, self.scale, &long_number):
                return 0
            return write_big_endian(long_number, room)
        if self.kind == TYPE_STRING or self.kind == TYPE_BYTES:
            return self.write(value, room, True)
        if self.kind != TYPE_RECORD or not self.takes(value, True):
            return 0
        n = PyTuple_GET_SIZE(self.parts)
        for i in range(n):
            field = self.field_of(value, i, True)
            if field is DAMAGED:
                return 0
            part = <TypeCodec>PyTuple_GET_ITEM(self.parts, i)
            take_room(room, 1)[0] = field is not None
            if field is None:
                continue
            if part.kind <= TYPE_DECIMAL:
                if not part.key_number(field, &number):
                    return 0
                memcpy(take_room(room, 8), &number, 8)
                continue
            if part.kind == TYPE_RECORD:
                if not part.write_key(field, room):
                    return 0
                continue
            begin = room.used
            take_room(room, 4)
            if not part.write_key(field, room):
                return 0
            length = <uint32_t>(room.used - begin - 4)
            memcpy(room.data + begin, &length, 4)
        return 1

    cdef object from_key_number(self, int64_t number):
        cdef double real
        cdef float single
        cdef int32_t bits
        if stands_for_integer(self.kind):
            return self.from_integer(number)
        if self.kind == TYPE_DOUBLE:
            memcpy(&real, &number, 8)
            return real
        if self.kind == TYPE_FLOAT:
            bits = <int32_t>number
            memcpy(&single, &bits, 4)
            return <double>single
        return DAMAGED

    cdef object key_of(self, const char *data, uint64_t length):
        """The key that has this canonical form of kind "bytes"."""
        cdef uint64_t at = 0
        cdef object key = self.read_key(data, length, &at)
        return key if at == length else DAMAGED

    cdef object read_key_run(self, const char *data, uint64_t length):
        """The STRING, BYTES or long DECIMAL of its canonical form."""
        cdef int128 number
        cdef uint64_t i
        if self.kind == TYPE_STRING or self.kind == TYPE_BYTES:
            return self.read(data, length)
        if self.kind != TYPE_LONG_DECIMAL or length == 0 or length > 16:
            return DAMAGED
        number = <signed char>data[0]
        for i in range(1, length):
            number = (number << 8) | <uint8_t>data[i]
        value = decimal_from_int(number, self.scale)
        return DAMAGED if value is None else value

    cdef object read_key(self, const char *data, uint64_t length, uint64_t *at):
        """The key whose canonical form begins at `at`, which moves to its end."""
        cdef Py_ssize_t n = PyTuple_GET_SIZE(self.parts), i
        cdef int64_t number
        cdef uint32_t run
        cdef TypeCodec part
        cdef list fields = []
        cdef object field
        if self.kind != TYPE_RECORD:
            at[0] = length
            return self.read_key_run(data, length)
        for i in range(n):
            part = <TypeCodec>PyTuple_GET_ITEM(self.parts, i)
            if at[0] >= length or (data[at[0]] & ~1) != 0:
                return DAMAGED
            at[0] += 1
            if data[at[0] - 1] == 0:
                fields.append(None)
                continue
            if part.kind <= TYPE_DECIMAL:
                if length - at[0] < 8:
                    return DAMAGED
                memcpy(&number, data + at[0], 8)
                at[0] += 8
                field = part.from_key_number(number)
            elif part.kind == TYPE_RECORD:
                field = part.read_key(data, length, at)
            else:
                if length - at[0] < 4:
                    return DAMAGED
                memcpy(&run, data + at[0], 4)
                if length - at[0] - 4 < run:
                    return DAMAGED
                field = part.read_key_run(data + at[0] + 4, run)
                at[0] += 4 + run
            if field is DAMAGED:
                return DAMAGED
            fields.append(field)
        return record_from(self, PySequence_Fast_ITEMS(fields), n)
