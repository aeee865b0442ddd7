"""Keys: the one canonical form of keys, map keys and namespaces, and the key groups of keys."""

from statebackend.keys import key_groups
from statebackend.keys.columns import (
    AssignedWindows,
    Columnar,
    TimeColumn,
    as_columnar,
    time_column,
    without_dictionary,
)
from statebackend.keys.encoders import KeyEncoder, key_encoder
from statebackend.keys.key_batches import (
    byte_runs_of,
    canonical_batch,
    canonical_column,
    canonical_list,
    count_of,
    floats_of,
    ints_of,
    numpy_of,
    runs_of_list,
    take_rows,
    wide_decimals_of,
)
from statebackend.keys.key_groups import MAX_PARALLELISM, KeyGroupRange, key_group_of, range_for, spark_hash
from statebackend.keys.namespaces import (
    ALL_NAMESPACES,
    VOID,
    Namespace,
    NamespaceColumn,
    TimeWindow,
    decode_namespace,
    encode_namespace,
    namespace_column,
    readable_namespaces,
)

__all__ = [
    "ALL_NAMESPACES",
    "AssignedWindows",
    "Columnar",
    "KeyEncoder",
    "KeyGroupRange",
    "MAX_PARALLELISM",
    "Namespace",
    "NamespaceColumn",
    "TimeColumn",
    "TimeWindow",
    "VOID",
    "as_columnar",
    "byte_runs_of",
    "canonical_batch",
    "canonical_column",
    "canonical_list",
    "count_of",
    "decode_namespace",
    "encode_namespace",
    "floats_of",
    "key_groups",
    "ints_of",
    "key_encoder",
    "key_group_of",
    "namespace_column",
    "numpy_of",
    "range_for",
    "readable_namespaces",
    "runs_of_list",
    "spark_hash",
    "take_rows",
    "time_column",
    "wide_decimals_of",
    "without_dictionary",
]
