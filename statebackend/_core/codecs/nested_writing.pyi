"""Arrow's buffers of nested types to stored values and canonical keys, without the GIL."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

@final
class SourcePart:
    def __init__(
        self,
        form: str,
        width: int,
        rows: int,
        *,
        origin: int = 0,
        valid: Any = None,
        first: int = 0,
        data: Any = None,
        offsets: Any = None,
        sizes: Any = None,
        is_wide: bool = False,
        step: int = -1,
        low: int = ...,
        high: int = ...,
        is_canonical: bool = False,
        parts: tuple[SourcePart, ...] = (),
    ) -> None: ...

def write_values(column: SourcePart) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None: ...
def write_keys(column: SourcePart) -> tuple[NDArray[np.int64], NDArray[np.uint8]] | None: ...
