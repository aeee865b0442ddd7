"""Data files: the rows of one subtask's states, as an Arrow IPC file with its own index.

Rows are sorted by state and key group, in batches of one state that may span key groups. All states share one Arrow
schema, so any Arrow reader opens the file. States with the same type for a column share it; it is null in the rows of
the others. `read_data_file` uses the index instead: it finds the rows of a state and of key groups without reading
others, returns each state with its own columns, and checks everything it reads.
"""

from statebackend.checkpoint.format.data_file_reader import DataFileReader, key_group_slices, read_data_file
from statebackend.checkpoint.format.data_file_writer import write_data_file
from statebackend.checkpoint.format.index import COLUMNS, GroupedBatch, Op, Section

__all__ = [
    "COLUMNS",
    "DataFileReader",
    "GroupedBatch",
    "Op",
    "Section",
    "key_group_slices",
    "read_data_file",
    "write_data_file",
]
