"""The console script ``statebackend``: the tools for stored state, for a shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from statebackend.command_line.console import DONE, FAILED, Console
from statebackend.command_line.parser import make_parser
from statebackend.errors import StateBackendError

__all__ = ["main"]

#: The status of a program that Ctrl-C has ended, as shells have it.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 refused or damaged, 2 wrong usage, 3 differences found.

    >>> main(["verify", "/nowhere"])
    1
    """
    options = make_parser().parse_args(arguments)
    console = Console(options)
    try:
        return int(options.run(options, console))
    except StateBackendError as error:
        return console.refuse(error)
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
