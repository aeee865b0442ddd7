"""The one canonical form of keys, map keys and namespaces.

>>> from statebackend.key_encoding import TimeWindow, encode_namespace, key_encoder
>>> key_encoder("bigint").encode(7), key_encoder("string").encode("é")
(7, b'\\xc3\\xa9')
>>> encode_namespace(TimeWindow(0, 60)) == encode_namespace((0, 60))
False
"""

from statebackend.key_encoding.encoders import KeyEncoder, key_encoder
from statebackend.key_encoding.namespaces import (
    ALL_NAMESPACES,
    VOID,
    Namespace,
    TimeWindow,
    decode_namespace,
    encode_namespace,
)

__all__ = [
    "ALL_NAMESPACES",
    "VOID",
    "KeyEncoder",
    "Namespace",
    "TimeWindow",
    "decode_namespace",
    "encode_namespace",
    "key_encoder",
]
