"""Values of a declared type to stored bytes and back, one by one or many at once.

The type's codec does it, without an object in between; other values go through the serializer, which words
the errors too. Both may run the user's code.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from statebackend._core.codecs.type_codec cimport DAMAGED, Room, TypeCodec, close_room, open_room, take_room
from statebackend._core.memory.byte_rows cimport check_rows, start_of
from statebackend._core.tables.values cimport TYPE_RECORD

from statebackend.errors import SerializationError, SerializationTypeError


@cython.final
cdef class ValueBytes:
    """Converts values of one role of a state; `codec` and `serializer` are its type's.

    >>> from statebackend.columns.codec_factory import type_codec
    >>> from statebackend.types import LONG
    >>> from statebackend.types.serializers import serializer_for
    >>> values = ValueBytes(LONG, type_codec(LONG), serializer_for(LONG), "state 's'")
    >>> values.decode(values.encode(7)), values.width
    (7, 8)
    """

    def __init__(self, declared, TypeCodec codec not None, serializer, str where not None):
        self.declared, self.codec, self.serializer, self.where = declared, codec, serializer, where
        self.width = serializer.fixed_width or 0
        self.reads_plain = codec.kind < TYPE_RECORD

    cdef int write(self, object value, Room *room) except -1:
        """Append the bytes of a value, which is not None."""
        cdef unsigned long long begin = room.used
        cdef bytes data
        if value is None:
            raise SerializationTypeError("None cannot be stored here", code="SERIALIZATION.NULL", detail=self.where)
        if self.codec.write(value, room, True):
            return 0
        room.used = begin
        try:
            data = self.serializer.serialize(value)
        except SerializationError as error:
            raise error.at(self.where) from None
        memcpy(take_room(room, PyBytes_GET_SIZE(data)), PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        return 0

    cdef bint write_plain(self, object value, Room *room) except -1:
        """The same, if that runs no Python; False, with nothing appended, if it would, or raise."""
        cdef unsigned long long begin = room.used
        if value is not None and self.codec.write(value, room, False):
            return True
        room.used = begin
        return False

    cdef object read(self, const char *data, size_t n):
        """The value of these bytes, a new object."""
        cdef object value = self.codec.read(data, n)
        if value is DAMAGED:
            return self.serializer.deserialize(PyBytes_FromStringAndSize(data, n))
        return value

    def encode(self, value):
        cdef Room room
        open_room(&room)
        try:
            self.write(value, &room)
            return PyBytes_FromStringAndSize(room.data, room.used)
        finally:
            close_room(&room)

    def decode(self, bytes data not None):
        """Return the value of these bytes, a new object."""
        return self.read(PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))

    def decode_many(self, const int64_t[::1] offsets not None, const uint8_t[::1] data not None,
                    const uint8_t[::1] nulls=None):
        """Return the values of many bytes, new objects; None for nulls."""
        cdef Py_ssize_t i, n = check_rows(offsets, data, "values")
        cdef const char *start = start_of(data)
        cdef list values = [None] * n
        for i in range(n):
            if nulls is None or not nulls[i]:
                values[i] = self.read(start + offsets[i], offsets[i + 1] - offsets[i])
        return values
