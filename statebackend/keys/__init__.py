"""Keys: the one canonical form of keys, map keys and namespaces, and the key groups of keys."""

from statebackend.keys import key_groups as key_groups
from statebackend.keys.columns import (
    Columnar as Columnar,
    arrow_of_byte_runs as arrow_of_byte_runs,
    as_columnar as as_columnar,
    byte_runs_of as byte_runs_of,
    canonical_batch as canonical_batch,
    canonical_column as canonical_column,
    canonical_list as canonical_list,
    count_of as count_of,
    floats_of as floats_of,
    ints_of as ints_of,
    numpy_of as numpy_of,
    runs_of_list as runs_of_list,
    take_rows as take_rows,
    wide_decimals_of as wide_decimals_of,
    without_dictionary as without_dictionary,
)
from statebackend.keys.encoders import KeyEncoder as KeyEncoder, key_encoder as key_encoder
from statebackend.keys.key_groups import (
    MAX_PARALLELISM as MAX_PARALLELISM,
    KeyGroupRange as KeyGroupRange,
    key_group_of as key_group_of,
    range_for as range_for,
    spark_hash as spark_hash,
)
from statebackend.keys.namespaces import (
    ALL_NAMESPACES as ALL_NAMESPACES,
    VOID as VOID,
    Namespace as Namespace,
    NamespaceColumn as NamespaceColumn,
    TimeWindow as TimeWindow,
    decode_namespace as decode_namespace,
    encode_namespace as encode_namespace,
    namespace_column as namespace_column,
    numbers_of as numbers_of,
    readable_namespaces as readable_namespaces,
)
from statebackend.keys.time_columns import (
    AssignedWindows as AssignedWindows,
    TimeColumn as TimeColumn,
    time_column as time_column,
)
