"""Timers as columns."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from statebackend._core.handles.key_context import KeyContext
from statebackend._core.handles.time_index import TimerHandle

def change_timers(
    context: KeyContext,
    handle: TimerHandle,
    numbers: NDArray[np.int64] | None,
    offsets: NDArray[np.int64] | None,
    data: NDArray[np.uint8] | None,
    times: NDArray[np.int64],
    spaces: NDArray[np.int64] | None,
    names: list[bytes],
    registers: bool,
) -> None: ...
def take_timers(
    context: KeyContext, handle: TimerHandle, now: int, most: int
) -> tuple[Any, NDArray[np.int64], NDArray[np.int64], list[bytes]]: ...
