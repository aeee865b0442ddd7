"""Commands of the console script, in this process: with pipes, or on a terminal of 80 columns."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from statebackend.command_line import main

LINES, COLUMNS = 24, 80


class Ran(NamedTuple):
    """What a command has left: its status and its output; on a terminal all of that is ``out``."""

    status: int
    out: str
    err: str = ""


def _status(arguments: tuple[Any, ...]) -> int:
    try:
        return main([str(each) for each in arguments])
    except SystemExit as error:  # of argparse
        return int(error.code or 0)


@contextlib.contextmanager
def _standard_input(stream: Any) -> Iterator[None]:
    before, sys.stdin = sys.stdin, stream
    try:
        yield
    finally:
        sys.stdin = before


def in_pipe(*arguments: Any) -> Ran:
    """Run a command without a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _standard_input(io.StringIO()):
        status = _status(arguments)
    return Ran(status, out.getvalue(), err.getvalue())


def on_terminal(*arguments: Any, answer: str = "") -> Ran:
    """Run a command on a terminal, on which ``answer`` is typed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    modes = termios.tcgetattr(slave)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    screen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while chunk := os.read(master, 4096):
                screen.append(chunk)

    reader = threading.Thread(target=read, daemon=True)
    with (
        open(slave, "w", encoding="utf-8", closefd=True) as shown,
        open(os.dup(slave), encoding="utf-8") as typed,
    ):
        reader.start()
        os.write(master, answer.encode())
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown), _standard_input(typed):
            status = _status(arguments)
    reader.join(timeout=10)
    os.close(master)
    return Ran(status, b"".join(screen).decode().replace("\r\n", "\n"))
