"""Contenders of this language in processes of their own, as those in a JVM are.

A round's keys and values are fresh objects. Where they come to lie is up to what was freed before: objects of a
dict that are replaced in random order leave holes all over, and whoever shares the process with it then visits
its keys in random order in memory. A JVM's keys always lie in the order in which they were made.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from bench.state.lockstep import Contender

__all__ = ["OwnProcess"]


class OwnProcess:
    """A contender that ``make(*arguments)`` builds in a new process. A context manager that ends it.

    >>> from bench.flink.keys import random_keys
    >>> from bench.state.lockstep import Rounds, make_local
    >>> with OwnProcess(make_local, "value_get", "dict", Rounds(random_keys(10), 0, 1)) as contender:
    ...     contender.run_round(0) > 0
    True
    """

    def __init__(self, make: Callable[..., Contender], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # which ends it
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def run_round(self, number: int) -> int:
        """Run a round there."""
        return int(self._call("run_round", number))

    def contents(self) -> int:
        """The checksum of what the state holds."""
        return int(self._call("contents"))

    def details(self) -> dict[str, Any]:
        """What to keep beside the figures."""
        return dict(self._call("details"))


def _serve(pipe: Connection, make: Callable[..., Contender], arguments: tuple[Any, ...]) -> None:
    contender = None
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        answer: Any
        try:
            contender = make(*arguments) if contender is None else contender
            answer = getattr(contender, method)(*given)
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is read
            answer = error
        pipe.send(answer)
