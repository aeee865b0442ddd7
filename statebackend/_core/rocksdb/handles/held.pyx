"""Values that were read, held apart from RocksDB while they are decoded.

Decoding may run the user's code. So values are read from a copy, never from where RocksDB has them: that code may
write, or close the backend.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

from statebackend._core.rocksdb.binding.database cimport Database, Pinned


cdef object hold(Database database, Pinned *found, Held *held):
    """Copy a value that was pinned, and unpin it; returns what keeps the copy, if it is longer than `held` itself."""
    cdef bytes owner = None
    held.size = found.size
    if found.size <= FEW:
        memcpy(held.few, found.data, found.size)
        held.data = held.few
        database.unpin(found)
        return None
    try:
        owner = PyBytes_FromStringAndSize(found.data, found.size)
    finally:
        database.unpin(found)
    held.data = PyBytes_AS_STRING(owner)
    return owner
