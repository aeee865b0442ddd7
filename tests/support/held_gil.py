"""Holding the GIL, as a regular expression or a sort does that takes long."""

from __future__ import annotations

import ctypes


def hold_gil(seconds: float) -> None:
    """Wait, and let no other thread of this process run Python."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a CDLL would release it
