"""A host as the driver sees it: questions to it, its answers, and that it is lost.

>>> Question("committed", {"batch": 7}).body
b''
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from statebackend._core.pulse import Pulse
from statebackend.cluster.failures import LOST_PIECES, raised
from statebackend.cluster.wire import Link, LinkError, Message
from statebackend.errors import HostError

__all__ = ["Answer", "HostLostError", "Question", "RegisteredHost", "checked"]


class HostLostError(HostError):
    """A host or a connection was lost: the batch can be tried again once there is another one.

    >>> HostLostError("a host was lost").code
    'HOST.LOST'
    """

    default_code = "HOST.LOST"


class Question(NamedTuple):
    """What a host is asked.

    >>> Question("committed", {"batch": 7}).body
    b''
    """

    op: str
    header: Mapping[str, Any] = {}
    body: bytes = b""


#: What a host has answered.
Answer = dict[str, Any]


class RegisteredHost:
    """A host that has registered, as long as its link and its pulse live.

    ``generation`` tells it from the hosts of the same range before and after it.
    """

    def __init__(self, link: Link, said: Mapping[str, Any], generation: int) -> None:
        self.link = link
        self.generation = generation
        self.number: int = said["number"]
        self.executor: str = said["executor"]
        #: Tells executors apart.
        self.place: str = said["place"]
        self.address: tuple[str, int] = (said["address"][0], said["address"][1])
        #: True once it has the state of the newest checkpoint.
        self.is_ready = False
        self.is_lost = False
        #: True if it was given up although its link lives: nobody knows when it will end.
        self.hangs = False
        #: True if the driver has let it go.
        self.was_told_to_end = False
        self._registered_at = time.monotonic()
        self._pulse: Pulse | None = None
        self._asked = 0
        #: The answers to questions that were asked; None until they come.
        self._answers: dict[int, Answer | None] = {}
        self._changed = threading.Condition()
        #: Held while it restores. So what it is asked last is the newest checkpoint, if one is committed meanwhile.
        self.beginning = threading.Lock()

    def __repr__(self) -> str:
        return f"host {self.number} on executor {self.executor}"

    def ask(self, question: Question) -> int:
        """Send a question; its number is what `answer` takes."""
        with self._changed:
            self._asked += 1
            number = self._asked
            self._answers[number] = None
        try:
            self.link.send(question.op, question.body, question=number, **question.header)
        except LinkError as error:
            self.lose()
            raise self.lost() from error
        return number

    def answer(self, number: int, limit: float | None) -> Answer:
        """Wait for the answer to a question; `HostLostError` if the host is lost meanwhile, or takes too long."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.is_lost or self._answers[number] is not None, limit)
            answer = self._answers.pop(number)
            if answer is not None:
                return answer
            if came:
                raise self.lost()
        self.hangs = True
        self.lose()
        raise HostLostError(
            "a host has not answered in time",
            detail=f"{self}, {limit} s",
            hint="if the function may take so long for a batch, pass a greater host_timeout",
        )

    def lost(self) -> HostLostError:
        return HostLostError("a host was lost", detail=repr(self))

    def heard(self, message: Message) -> None:
        """Take what it has said."""
        if message.header["op"] == "answer":
            number = message.header["question"]
            with self._changed:
                if self._answers.get(number, message) is None:
                    self._answers[number] = message.header
                    self._changed.notify_all()

    def begin_pulse(self, link: Link, silence: float) -> None:
        """Have the connection of a link for signs of life."""
        with self._changed:
            if not self.is_lost and self._pulse is None:
                self._pulse = Pulse(link.detach(), patience=silence, asks=True)

    def end_of_pulse(self, silence: float) -> str | None:
        """Why it gives no sign of life; None if it does, or has registered less than ``silence`` seconds ago."""
        if self._pulse is None:
            return None if time.monotonic() - self._registered_at < silence else "silent"
        over: str | None = self._pulse.over
        return over

    @property
    def stands_for(self) -> float:
        """The seconds for which the function has run there and none of its calls has returned; 0.0 if it does not
        run.
        """
        return 0.0 if self._pulse is None else self._pulse.stands_for

    def lose(self) -> None:
        """Give it up: whoever waits for it is told."""
        with self._changed:
            self.is_lost = True
            self._changed.notify_all()
        self.link.close()
        if self._pulse is not None:
            self._pulse.stop()


def checked(answer: Answer, host: object) -> Answer:
    """The answer itself, unless it is an error: that is raised here."""
    said = answer.get("error")
    if said is None:
        return answer
    if said["code"] == LOST_PIECES:
        raise HostLostError(said["message"], detail=repr(host))
    raise raised(said, repr(host))
