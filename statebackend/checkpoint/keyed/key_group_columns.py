"""The key groups of columns of keys, computed by the compiled core.

>>> from statebackend.types import LONG
>>> grouping(LONG, 128)(pa.array([-1, 42])).tolist()
[41, 88]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from statebackend.keys import key_encoder
from statebackend.types import Type

__all__ = ["grouping"]


def grouping(key_type: Type, max_parallelism: int) -> Callable[[pa.Array], NDArray[np.uint16]]:
    """Return the function from keys of a type to their key groups, O(n). Loads the core, which the module does not.

    >>> from statebackend.types import STRING
    >>> grouping(STRING, 1)(pa.array(["a", "b"])).tolist()
    [0, 0]
    """
    from statebackend._core.key_groups import HashPlan

    encoder = key_encoder(key_type)
    plan = HashPlan(encoder.hash_plan)

    def groups_of(keys: pa.Array) -> NDArray[np.uint16]:
        canonical = encoder.encode_many(keys)
        if encoder.kind == "int":
            return plan.key_groups_of_ints(canonical, max_parallelism)
        offsets, data = canonical
        return plan.key_groups_of_bytes(offsets, data, max_parallelism)

    return groups_of
