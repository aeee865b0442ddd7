"""Codecs of values and keys; `key_value_codecs.pxd` explains their purpose."""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.codecs.type_codec cimport DAMAGED, ROOM, Room, TypeCodec, close_room, open_room
from statebackend._core.memory.arena cimport Blob, blob_data
from statebackend._core.memory.interpreter cimport (
    PyBytes_CheckExact, PyErr_Clear, PyLong_CheckExact, PyUnicode_AsUTF8AndSize, PyUnicode_CheckExact,
    PyUnicode_DecodeUTF8)
from statebackend._core.tables.cow_map cimport VALUE_BLOB, VALUE_FIXED, VALUE_OBJECT, CoreKey
from statebackend._core.key_groups cimport HashPlan
from statebackend._core.memory.platform cimport likely, unlikely
from statebackend._core.tables.objects cimport object_at, take_object
from statebackend._core.tables.state_core cimport StateCore, end_objects
from statebackend._core.tables.values cimport (
    MAX_BYTES, TYPE_BOOL, TYPE_BYTES, TYPE_DOUBLE, TYPE_STRING, blob_of_value, drop_value, load_blob, load_number,
    long_as_int64, store_number)

from statebackend._core.tables.state_table import FIXED_CODES
from statebackend.errors import MemoryLimitError, SerializationError, SerializationTypeError, UsageError

cdef int64_t EXACT = <int64_t>1 << 53    # a double holds every integer up to here

FORMS = {
    **FIXED_CODES, "string": (TYPE_STRING, 8), "bytes": (TYPE_BYTES, 8), "serialized": (FORM_SERIALIZED, 8),
    "object": (FORM_OBJECT, 8)}
KEY_FORMS = {"string": KEY_STRING, "bytes": KEY_BYTES, "encoded": KEY_ENCODED}
WIDEST_IN_ENTRY = MAX_STORED


@cython.final
@cython.no_gc_clear
cdef class ValueCodec:
    """Converts values of one role of a state to their stored form and back.

    `form` is one of `FORMS`, or the fixed width of
    the serializer's bytes. `typed` is for these and for "serialized", `copy_value` for "object".
    """

    def __init__(self, form, serializer, str where not None, copy_value=None, TypeCodec typed=None):
        if isinstance(form, int):
            if not 0 < form <= MAX_STORED:
                raise UsageError(f"an entry holds values of 1 to {<int>MAX_STORED} bytes", detail=f"{form}")
            self.form, self.width, self.layout = FORM_RAW, form, form
        elif form in FORMS:
            self.form, self.width = FORMS[form]
            self.layout = form if self.form <= TYPE_BOOL or self.form == FORM_OBJECT else "bytes"
        else:
            raise UsageError("there is no such form of values", detail=repr(form))
        self.serializer = serializer
        self.where = where
        self.copy_value = copy_value
        self.typed = typed
        self.is_native = self.form not in (FORM_RAW, FORM_SERIALIZED) and copy_value is None

    cdef int store_native(self, StateCore core, object value, char *out) except -1:
        """Write the stored form of a native value and return 1; return 0 for any other value. Runs no Python."""
        cdef int64_t number
        cdef Py_ssize_t length
        cdef const char *data
        cdef int form = self.form
        if form <= TYPE_BOOL:
            if likely(store_number(form, value, out)):
                return 1
            if form == TYPE_DOUBLE and PyLong_CheckExact(value) and long_as_int64(value, &number) and (
                    -EXACT <= number <= EXACT):
                (<double *>out)[0] = <double>number
                return 1
            return 0
        if form == TYPE_STRING:
            if not PyUnicode_CheckExact(value):
                return 0
            data = PyUnicode_AsUTF8AndSize(value, &length)
            if unlikely(data == NULL):
                PyErr_Clear()            # a lone surrogate: the serializer raises the proper error
                return 0
        elif form == TYPE_BYTES:
            if not PyBytes_CheckExact(value):
                return 0
            data = PyBytes_AS_STRING(value)
            length = PyBytes_GET_SIZE(value)
        elif form == FORM_OBJECT:
            take_object(&core.core.objects, value, out)
            return 1
        else:
            return 0
        self.put_blob(core, data, length, out)
        return 1

    cdef int put_blob(self, StateCore core, const char *data, uint64_t length, char *out) except -1:
        cdef Blob *blob = blob_of_value(core.arena.blobs, data, length)
        if unlikely(blob == NULL):
            self.no_memory(core)
        (<Blob **>out)[0] = blob
        return 0

    cdef int store(self, StateCore core, object value, char *out) except -1:
        """As `store_native`, also for values that the type's codec can write without running Python."""
        cdef Room room
        if self.typed is None:
            return self.store_native(core, value, out)
        open_room(&room)
        try:
            if not self.typed.write(value, &room, False):
                return 0
            if self.form == FORM_RAW:
                memcpy(out, room.data, self.width)
            elif room.used > MAX_BYTES:
                return 0
            else:
                self.put_blob(core, room.data, room.used, out)
            return 1
        finally:
            close_room(&room)

    cdef bytes serialized(self, object value):
        """The serializer's bytes; errors name the state. May run the user's code."""
        cdef object data
        if value is None:
            self.refuse_none()
        if self.typed is not None:
            data = self.typed.encode(value)
            if data is not None:
                return data
        try:
            return self.serializer.serialize(value)
        except SerializationError as error:
            raise error.at(self.where) from None

    cdef int refuse_none(self) except -1:
        raise SerializationTypeError("None cannot be stored here", code="SERIALIZATION.NULL", detail=self.where)

    cdef int no_memory(self, StateCore core) except -1:
        """Raise the proper error after the core ran out of memory, naming the state that wanted it."""
        try:
            core.out_of_memory()
        except MemoryLimitError as error:
            raise error.at(self.where) from None

    cdef int store_bytes(self, StateCore core, bytes data, char *out) except -1:
        """Write the stored form of a value that `serialized` returned. Runs no Python."""
        if self.form < TYPE_STRING:
            if unlikely(PyBytes_GET_SIZE(data) != self.width):
                raise SerializationError("serialize() did not return fixed_width bytes", detail=self.where,
                                         code="SERIALIZATION.LENGTH")
            memcpy(out, PyBytes_AS_STRING(data), self.width)
            return 0
        return self.put_blob(core, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), out)

    cdef object prepared(self, object value):
        """The value itself, or its bytes: a form that `store_prepared` takes without running Python."""
        cdef char scratch[MAX_STORED]
        cdef Py_ssize_t length
        if value is None:
            self.refuse_none()
        if self.form == TYPE_STRING:
            if PyUnicode_CheckExact(value):
                if PyUnicode_AsUTF8AndSize(value, &length) != NULL:
                    return value
                PyErr_Clear()
        elif self.form == TYPE_BYTES and PyBytes_CheckExact(value) or self.form == FORM_OBJECT:
            return value
        elif self.form < TYPE_STRING and self.store_native(None, value, scratch):
            return value
        return self.serialized(value)

    cdef int store_prepared(self, StateCore core, object value, char *out) except -1:
        if not self.store_native(core, value, out):
            self.store_bytes(core, value, out)
        return 0

    cdef void drop(self, StateCore core, char *stored) noexcept:
        """Drop the references of a stored form that was not put in."""
        cdef int kind = VALUE_FIXED if self.form < TYPE_STRING else VALUE_BLOB
        drop_value(&core.core, VALUE_OBJECT if self.form == FORM_OBJECT else kind, stored)
        end_objects(core)

    cdef object load(self, char *value):
        """The Python object of a stored value, which is not None. A deserializer may run the user's code."""
        cdef Blob *blob
        cdef int form = self.form
        if form <= TYPE_BOOL:
            return load_number(form, value)
        if form == TYPE_STRING:
            blob = (<Blob **>value)[0]
            try:
                return PyUnicode_DecodeUTF8(blob_data(blob), blob.length, NULL)
            except UnicodeDecodeError:
                return self.deserialized(blob_data(blob), blob.length)
        if form == TYPE_BYTES:
            return load_blob(value)
        if form == FORM_OBJECT:
            return object_at(value)
        if form == FORM_SERIALIZED:
            blob = (<Blob **>value)[0]
            return self.deserialized(blob_data(blob), blob.length)
        return self.deserialized(value, self.width)

    cdef object load_raw(self, char *value):
        """The raw bytes of a stored value, which `finished` turns into an object. Runs no Python."""
        if self.form == FORM_SERIALIZED:
            return load_blob(value)
        if self.form == FORM_RAW:
            return PyBytes_FromStringAndSize(value, self.width)
        return self.load(value)

    cdef object finished(self, object raw):
        """Turn the result of `load_raw` into the object; copies an object that could be changed."""
        if self.form == FORM_SERIALIZED or self.form == FORM_RAW:
            return self.deserialized(PyBytes_AS_STRING(raw), PyBytes_GET_SIZE(raw))
        if self.copy_value is not None:
            return self.copy_value(raw)
        return raw

    cdef object deserialized(self, char *data, uint64_t length):
        # Copy first: the code that runs from here on may change the state, if only as a finaliser.
        cdef char few[ROOM]
        cdef bytes copied = None
        cdef object value
        if self.typed is not None:
            if length <= ROOM:
                memcpy(few, data, length)
                value = self.typed.read(few, length)
            else:
                copied = PyBytes_FromStringAndSize(data, length)
                value = self.typed.read(PyBytes_AS_STRING(copied), length)
            if value is not DAMAGED:
                return value
            if copied is None:
                copied = PyBytes_FromStringAndSize(few, length)
        else:
            copied = PyBytes_FromStringAndSize(data, length)
        try:
            return self.serializer.deserialize(copied)
        except SerializationError as error:
            raise error.at(self.where) from None


@cython.final
@cython.no_gc_clear
cdef class KeyCodec:
    """Converts keys, or map keys, of one type to canonical form and back.

    `form` is "string", "bytes" or "encoded", or the number of bits of an integer; `encoder` the KeyEncoder; `typed` the
    codec of an encoded type.
    """

    def __init__(self, form, encoder, TypeCodec typed=None):
        self.encoder = encoder
        self.typed = typed
        self.plan = HashPlan(encoder.hash_plan)
        self.is_int = self.plan.is_int
        if isinstance(form, int):
            self.form = KEY_NUMBER
            self.high = (<int64_t>1 << <int>(form - 2)) - 1 + (<int64_t>1 << <int>(form - 2))
            self.low = -self.high - 1
        else:
            self.form = KEY_FORMS[form]

    cdef object split(self, object key, CoreKey *out):
        """The number, or pointer and length, of a key's canonical form; returns the owner of the pointer."""
        cdef Py_ssize_t length
        cdef object canonical
        if self.form == KEY_NUMBER:
            if (likely(PyLong_CheckExact(key)) and long_as_int64(key, &out.number)
                    and self.low <= out.number <= self.high):
                return None
        elif self.form == KEY_STRING:
            if PyUnicode_CheckExact(key):
                out.data = PyUnicode_AsUTF8AndSize(key, &length)
                if likely(out.data != NULL):
                    if unlikely(length > MAX_BYTES):
                        raise OverflowError("a key is larger than 2 GB")
                    out.length = length
                    return key
                PyErr_Clear()            # a lone surrogate: the encoder raises the proper error
        elif self.form == KEY_BYTES:
            if PyBytes_CheckExact(key):
                return self.split_canonical(key, out)
        elif self.typed is not None:
            if self.is_int:
                if self.typed.key_number(key, &out.number):
                    return None
            else:
                canonical = self.encoded(key)
                if canonical is not None:
                    return self.split_canonical(canonical, out)
        return self.split_canonical(self.encoder.encode(key), out)

    cdef object encoded(self, object key):
        """The canonical form of a key of kind "bytes"; None if only the encoder can tell."""
        cdef Room room
        open_room(&room)
        try:
            return PyBytes_FromStringAndSize(room.data, room.used) if self.typed.write_key(key, &room) else None
        finally:
            close_room(&room)

    cdef object split_canonical(self, object canonical, CoreKey *out):
        """As `split`, except for a canonical form."""
        if self.is_int:
            if not long_as_int64(canonical, &out.number):
                raise OverflowError("a key does not fit in 64 bits")
            return None
        if not PyBytes_CheckExact(canonical):
            raise SerializationTypeError("the canonical form of a key is bytes",
                                         detail=f"got {type(canonical).__name__}")
        if PyBytes_GET_SIZE(canonical) > MAX_BYTES:
            raise OverflowError("a key is larger than 2 GB")
        out.data = PyBytes_AS_STRING(canonical)
        out.length = PyBytes_GET_SIZE(canonical)
        return canonical

    cdef object canonical(self, CoreKey *key):
        """The canonical form as an int or bytes."""
        if self.is_int:
            return key.number
        return PyBytes_FromStringAndSize(key.data, key.length)

    cdef object key_of(self, int64_t number, const char *data, uint64_t length):
        """The key that has this canonical form. A decoder may run Python."""
        cdef bytes canonical
        cdef object key
        if self.form == KEY_NUMBER:
            return number
        if self.is_int:
            if self.typed is not None:
                key = self.typed.from_key_number(number)
                if key is not DAMAGED:
                    return key
            return self.encoder.decode(number)
        if self.form == KEY_STRING:
            return PyUnicode_DecodeUTF8(data, length, NULL)
        if self.form == KEY_BYTES:
            return PyBytes_FromStringAndSize(data, length)
        canonical = PyBytes_FromStringAndSize(data, length)
        if self.typed is not None:
            key = self.typed.key_of(PyBytes_AS_STRING(canonical), length)
            if key is not DAMAGED:
                return key
        return self.encoder.decode(canonical)

    cdef bint has_constant_keys(self) noexcept:
        """Whether keys, as they come from their canonical form, can never change."""
        return self.form != KEY_ENCODED or (self.typed is not None and self.typed.kind <= TYPE_BYTES)
