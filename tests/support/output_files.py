"""The output of a batch, written as a runtime writes it."""

from __future__ import annotations

import pyarrow as pa

from statebackend.checkpoint import DataWriter, StoredFile
from statebackend.runtime.output import OutputFiles


def write_output(writer: DataWriter, rows: pa.Table) -> StoredFile:
    """The file of an output with these rows, durable."""
    files = OutputFiles(lambda: writer)
    files.write("main", [rows])
    return files.finish()["main"][0]
