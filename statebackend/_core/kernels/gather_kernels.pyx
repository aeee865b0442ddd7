"""Gathers lists into columns that Arrow can share. Slots come from the batch call before, and end with the next one."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from statebackend._core.tables.cow_map cimport (
    ListChunk, ListHead, Table, elements_of, entry_at, value_of)
from statebackend._core.memory.platform cimport prefetch
from statebackend._core.tables.state_table cimport StateTable
from statebackend._core.tables.values cimport CODE_BLOB, CODE_LIST, CODE_OBJECT, CODE_RAW

from statebackend._core.memory.blob_columns import blobs_of
from statebackend._core.tables.state_table import DTYPES
from statebackend.errors import UsageError

cdef enum:
    AHEAD = 24                           # entries are prefetched this many rows ahead


def no_values(StateTable table not None, int64_t n):
    """The values of `n` keys that have none: zeros, rows of zeros, or (offsets, data) without bytes.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> no_values(StateTable(StateCore(), value="long"), 2)
    array([0, 0])
    """
    if table.value_code >= CODE_OBJECT:
        raise UsageError("objects, lists and anchors are not read in batches")
    if table.value_code == CODE_BLOB:
        return np.zeros(n + 1, dtype=np.int64), np.empty(0, dtype=np.uint8)
    values = np.zeros((n, table.table.layout.value_width), dtype=np.uint8)
    return values if table.value_code == CODE_RAW else values.view(DTYPES[table.value_code]).reshape(-1)


cdef void *address_of(uint8_t[::1] data) noexcept:
    return &data[0]


def lists_at(StateTable table not None, slots):
    """The lists in slots: the offsets of each, and all elements as an array, rows of bytes, or (offsets, data).

    Slot 0 is an empty list.

    >>> from statebackend._core.tables.state_core import StateCore
    >>> from statebackend._core.tables.state_table import StateTable
    >>> table = StateTable(StateCore(), value=("list", "long"))
    >>> table.append(5, 1); table.append(5, 2)
    >>> from statebackend._core.kernels.batch_kernels import find_many
    >>> lists_at(table, find_many(table, np.array([4, 5])))
    (array([0, 0, 2]), array([1, 2]))
    """
    cdef const uint32_t[::1] by_row = slots
    cdef int64_t n = len(slots), i, total = 0, at
    cdef Table *t = table.table
    cdef uint32_t width = t.element_value_width, used
    cdef ListHead *head
    cdef ListChunk *chunk
    cdef char *out
    if table.value_code != CODE_LIST or table.element_code >= CODE_OBJECT or t.element_has_timestamp:
        raise UsageError("this table does not hold lists that are read in batches")
    offsets = np.zeros(n + 1, dtype=np.int64)
    cdef int64_t[::1] ends = offsets
    with nogil:
        for i in range(n):
            if i + AHEAD < n and by_row[i + AHEAD]:
                prefetch(value_of(t, entry_at(t.core, by_row[i + AHEAD])))
            if by_row[i]:
                total += (<ListHead *>value_of(t, entry_at(t.core, by_row[i]))).length
            ends[i + 1] = total
    values = np.empty((total, width), dtype=np.uint8)
    if total:
        out = <char *>address_of(values.reshape(-1))
        with nogil:
            for i in range(n):
                if i + AHEAD < n and by_row[i + AHEAD]:
                    prefetch((<ListHead *>value_of(t, entry_at(t.core, by_row[i + AHEAD]))).tail)
                if by_row[i] == 0:
                    continue
                head = <ListHead *>value_of(t, entry_at(t.core, by_row[i]))
                chunk = head.tail
                used = head.tail_used
                at = ends[i + 1]
                while at > ends[i]:
                    at -= used
                    memcpy(out + width * at, elements_of(t, chunk), <uint64_t>width * used)
                    used = chunk.prev_used
                    chunk = chunk.prev
    if table.element_code == CODE_BLOB:
        return offsets, blobs_of(values.view(np.uint64).reshape(-1))
    return offsets, values if table.element_code == CODE_RAW else values.view(DTYPES[table.element_code]).reshape(-1)
