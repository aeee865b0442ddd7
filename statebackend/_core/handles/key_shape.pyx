"""The bytes of a key, from where its object and what that refers to lie in memory.

STRING and BYTES keys, and composite ones of up to eight integers, truths, texts and byte strings, have a shape: their
objects are a `str`, a `bytes`, or a tuple of such objects. There are two ways to read one:

    bytes_of_tuple    of a key that somebody has given. It makes the bytes without an object, where the shape is right
    bytes_ahead       of what may be a key, at an address that was guessed

What is guessed may be no object any more. `look_ahead.pxd` reads an `int` only from the page on which an object lies
that is alive. Here the same holds for each object: the tuple lies on the page of the tuple that is the current key, and
each of its items on the page of the current key's item at that position. A freed tuple may still name items that are
gone; then these addresses are on such a page, or nobody reads there. An item that is the current key's own, or one of
Python's small integers, is alive. Lengths are read once, and end where the page does.
"""

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uintptr_t
from libc.string cimport memcpy

from statebackend._core.codecs.codecs cimport KEY_BYTES, KEY_STRING, KeyCodec
from statebackend._core.codecs.type_codec cimport (
    TYPE_BOOL, TYPE_BYTE, TYPE_BYTES, TYPE_RECORD, TYPE_STRING, TypeCodec)
from statebackend._core.handles.look_ahead cimport (
    GUESS_BYTES, LOOKS_AHEAD, PAGE_OF_MEMORY, PEEKED, peek_int)
from statebackend._core.tables.objects cimport goes_as_tuple, long_as_int64

cdef extern from "Python.h":
    bint PyLong_CheckExact(object o)
    bint PyUnicode_CheckExact(object o)
    bint PyBytes_CheckExact(object o)
    bint PyTuple_Check(object o)
    Py_ssize_t PyTuple_GET_SIZE(object o)
    PyObject *PyTuple_GET_ITEM(PyObject *o, Py_ssize_t i)
    const char *PyUnicode_AsUTF8AndSize(object o, Py_ssize_t *size) noexcept
    const char *PyBytes_AS_STRING(object o)
    Py_ssize_t PyBytes_GET_SIZE(object o)
    void PyErr_Clear()
    PyObject *Py_None
    PyObject *Py_True
    PyObject *Py_False

cdef extern from *:
    """
    #define SB_TUPLE_HEAD offsetof(PyTupleObject, ob_item)
    #define SB_TEXT_HEAD sizeof(PyASCIIObject)
    #define SB_BYTES_HEAD offsetof(PyBytesObject, ob_sval)

    /* Whether there may be a tuple of the same class and length. */
    static inline int sb_is_like(uintptr_t at, PyObject *tuple) {
        return Py_TYPE((PyObject *)at) == Py_TYPE(tuple)
            && ((PyVarObject *)at)->ob_size == ((PyVarObject *)tuple)->ob_size;
    }
    static inline uintptr_t sb_item_at(uintptr_t at, Py_ssize_t i) {
        return (uintptr_t)((PyTupleObject *)at)->ob_item[i];
    }
    /* The length of a str whose characters, all of them ASCII, may follow its head; -1 if there is none. */
    static inline Py_ssize_t sb_text_at(uintptr_t at) {
        const PyASCIIObject *text = (const PyASCIIObject *)at;
        if (Py_TYPE((PyObject *)at) != &PyUnicode_Type || !text->state.compact || !text->state.ascii) return -1;
        return __atomic_load_n(&text->length, __ATOMIC_RELAXED);
    }
    static inline Py_ssize_t sb_bytes_at(uintptr_t at) {
        if (Py_TYPE((PyObject *)at) != &PyBytes_Type) return -1;
        return __atomic_load_n(&((PyVarObject *)at)->ob_size, __ATOMIC_RELAXED);
    }
    """
    const int TUPLE_HEAD "SB_TUPLE_HEAD"
    const int TEXT_HEAD "SB_TEXT_HEAD"
    const int BYTES_HEAD "SB_BYTES_HEAD"
    bint is_like "sb_is_like"(uintptr_t at, PyObject *tuple) noexcept
    uintptr_t item_at "sb_item_at"(uintptr_t at, Py_ssize_t i) noexcept
    Py_ssize_t text_at "sb_text_at"(uintptr_t at) noexcept
    Py_ssize_t bytes_at "sb_bytes_at"(uintptr_t at) noexcept

cdef enum:
    INT_BYTES = 32                       # from one of Python's small integers to the next

# They lie one after another, and never go.
cdef object SMALLEST = -5, LARGEST = 256
cdef uintptr_t smallest_at = <uintptr_t><PyObject *>SMALLEST
cdef uintptr_t small_bytes = <uintptr_t><PyObject *>LARGEST - smallest_at
if small_bytes != INT_BYTES * 261:
    small_bytes = 0


cdef void shape_of(KeyCodec codec, KeyShape *shape):
    """Find the shape of the keys of a codec."""
    cdef TypeCodec part
    cdef Py_ssize_t i
    shape.form, shape.n = SHAPE_NONE, 0
    if codec.form == KEY_STRING:
        shape.form = SHAPE_TEXT
    elif codec.form == KEY_BYTES:
        shape.form = SHAPE_BYTES
    elif codec.typed is not None and codec.typed.kind == TYPE_RECORD and len(codec.typed.parts) <= MOST_PARTS:
        for i, part in enumerate(codec.typed.parts):
            if part.kind <= TYPE_BYTE:
                shape.parts[i].form = PART_INTEGER
                shape.parts[i].low, shape.parts[i].high = part.low, part.high
            elif part.kind == TYPE_BOOL:
                shape.parts[i].form = PART_TRUTH
            elif part.kind == TYPE_STRING:
                shape.parts[i].form = PART_TEXT
            elif part.kind == TYPE_BYTES:
                shape.parts[i].form = PART_BYTES
            else:
                return
        shape.form, shape.n = SHAPE_TUPLE, len(codec.typed.parts)


# --- keys that are there ---

cdef inline bint put_part(const PartShape *part, object item, Writer *writer) noexcept:
    cdef int64_t number
    cdef Py_ssize_t length
    cdef const char *data
    if part.form == PART_INTEGER and PyLong_CheckExact(item):
        return (long_as_int64(item, &number) and part.low <= number <= part.high
                and put_number(writer, number))
    if item is None:
        return put_none(writer)
    if part.form == PART_TEXT and PyUnicode_CheckExact(item):
        data = PyUnicode_AsUTF8AndSize(item, &length)
        if data == NULL:
            PyErr_Clear()                # a lone surrogate: the encoder raises the proper error
            return False
        return put_run(writer, data, length)
    if part.form == PART_BYTES and PyBytes_CheckExact(item):
        return put_run(writer, PyBytes_AS_STRING(item), PyBytes_GET_SIZE(item))
    if part.form == PART_TRUTH and (<PyObject *>item == Py_True or <PyObject *>item == Py_False):
        return put_number(writer, <PyObject *>item == Py_True)
    return False


cdef int64_t bytes_of_tuple(const KeyShape *shape, PyObject *key, char *out) noexcept:
    """Write the canonical form of a composite key; returns how many bytes, 0 if it takes the general way."""
    cdef Writer writer
    cdef Py_ssize_t i
    if not PyTuple_Check(<object>key) or PyTuple_GET_SIZE(<object>key) != shape.n or not goes_as_tuple(<object>key):
        return 0
    writer.at, writer.end = out, out + GUESS_BYTES
    for i in range(shape.n):
        if not put_part(&shape.parts[i], <object>PyTuple_GET_ITEM(key, i), &writer):
            return 0
    return writer.at - out


# --- keys that may be there ---

cdef inline bint can_read(uintptr_t at, uintptr_t near, Py_ssize_t n) noexcept:
    """Return True if so many bytes lie in an object that is alive, or on the page where one begins."""
    return at == near or ((at ^ near) < PAGE_OF_MEMORY and at % 8 == 0
                          and at % PAGE_OF_MEMORY + n <= PAGE_OF_MEMORY)


cdef inline bint is_small(uintptr_t at) noexcept:
    return at - smallest_at <= small_bytes and (at - smallest_at) % INT_BYTES == 0 and small_bytes != 0


cdef inline Py_ssize_t text_ahead(uintptr_t at, uintptr_t near) noexcept:
    """The length of a text that may be there, all of which can be read; -1 if there is none that is short."""
    cdef Py_ssize_t length
    if not can_read(at, near, TEXT_HEAD):
        return -1
    length = text_at(at)
    return length if 0 <= length <= GUESS_BYTES and can_read(at, near, TEXT_HEAD + length) else -1


cdef inline Py_ssize_t run_ahead(uintptr_t at, uintptr_t near) noexcept:
    """The same for bytes."""
    cdef Py_ssize_t length
    if not can_read(at, near, BYTES_HEAD):
        return -1
    length = bytes_at(at)
    return length if 0 <= length <= GUESS_BYTES and can_read(at, near, BYTES_HEAD + length) else -1


cdef inline bint put_part_ahead(const PartShape *part, uintptr_t at, uintptr_t near, Writer *writer) noexcept:
    cdef int64_t number
    cdef Py_ssize_t length
    if at == <uintptr_t>Py_None:
        return put_none(writer)
    if part.form == PART_INTEGER:
        return ((can_read(at, near, PEEKED) or is_small(at)) and peek_int(at, &number)
                and part.low <= number <= part.high and put_number(writer, number))
    if part.form == PART_TEXT:
        length = text_ahead(at, near)
        return length >= 0 and put_run(writer, <const char *>at + TEXT_HEAD, length)
    if part.form == PART_BYTES:
        length = run_ahead(at, near)
        return length >= 0 and put_run(writer, <const char *>at + BYTES_HEAD, length)
    return ((at == <uintptr_t>Py_True or at == <uintptr_t>Py_False)
            and put_number(writer, at == <uintptr_t>Py_True))


cdef int64_t bytes_ahead(const KeyShape *shape, uintptr_t at, PyObject *near, char *out) noexcept:
    """Write the canonical form of the key that may lie at an address; returns how many bytes, 0 if there is none.

    `near` is alive; what is read lies on its page, and on those of its items.
    """
    cdef Writer writer
    cdef Py_ssize_t i, length = -1
    if not LOOKS_AHEAD:
        return 0
    if shape.form == SHAPE_TUPLE:
        if (not PyTuple_Check(<object>near) or not can_read(at, <uintptr_t>near, TUPLE_HEAD + 8 * shape.n)
                or PyTuple_GET_SIZE(<object>near) != shape.n or not is_like(at, near)):
            return 0
        writer.at, writer.end = out, out + GUESS_BYTES
        for i in range(shape.n):
            if not put_part_ahead(&shape.parts[i], item_at(at, i), <uintptr_t>PyTuple_GET_ITEM(near, i), &writer):
                return 0
        return writer.at - out
    if shape.form == SHAPE_TEXT:
        length = text_ahead(at, <uintptr_t>near)
        at += TEXT_HEAD
    elif shape.form == SHAPE_BYTES:
        length = run_ahead(at, <uintptr_t>near)
        at += BYTES_HEAD
    if length <= 0:
        return 0
    memcpy(out, <const char *>at, length)
    return length


# --- for tests ---

def _bytes_of(KeyCodec codec not None, key):
    """The canonical form of a composite key, or None if it takes the general way. For tests."""
    cdef KeyShape shape
    cdef char out[GUESS_BYTES]
    cdef int64_t length
    shape_of(codec, &shape)
    length = bytes_of_tuple(&shape, <PyObject *>key, out) if shape.form == SHAPE_TUPLE else 0
    return out[:length] if length else None


def _bytes_ahead(KeyCodec codec not None, uintptr_t at, near):
    """The canonical form of what looks like a key at an address, near one that is alive; or None. For tests."""
    cdef KeyShape shape
    cdef char out[GUESS_BYTES]
    cdef int64_t length
    shape_of(codec, &shape)
    length = bytes_ahead(&shape, at, <PyObject *>near, out)
    return out[:length] if length else None


def _read_at_most():
    """How many bytes are read of a tuple without items, of a text and a byte string without characters, of an int."""
    return TUPLE_HEAD, TEXT_HEAD, BYTES_HEAD, PEEKED
