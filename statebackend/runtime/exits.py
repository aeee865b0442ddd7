"""Exits: `SystemExit`, `KeyboardInterrupt`, `asyncio.CancelledError` and others that are no `Exception`.

>>> summary(SystemExit(3)), summary(GeneratorExit())
('SystemExit: 3', 'GeneratorExit')
>>> text_of(ValueError("\\udcff"))
'\\\\udcff'
"""

from __future__ import annotations

import threading

__all__ = ["is_interrupt", "summary", "text_of"]


def is_interrupt(error: BaseException) -> bool:
    """Return True if the user may have interrupted the program: Python raises that in the main thread alone.

    >>> is_interrupt(KeyboardInterrupt()), is_interrupt(SystemExit())
    (True, False)
    """
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def summary(error: BaseException) -> str:
    """The class of an error and its text, in one line if the text is one."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: object) -> str:
    """The text of an error, whose class is the user's and may fail at that, too."""
    try:
        # PySpark sends it to the JVM in UTF-8, which has no lone surrogates.
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except BaseException as other:  # noqa: BLE001 - any: another error is to be told
        return f"its text cannot be had: {type(other).__name__}"
