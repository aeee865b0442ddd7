"""Names of parametrised tests that are the same in every process, as running them in several needs."""

from __future__ import annotations

import re


def stable_repr(value: object) -> str:
    """``repr`` without the address that tells objects apart."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
