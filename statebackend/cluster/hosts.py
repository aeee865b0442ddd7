"""The driver's side of hosts: who serves which range, who still lives, and questions to all of them at once.

There is one valid host for a range at any time. A process that registers for a range whose host lives is refused, and
ends; where the host before has been lost, the new one takes its place and is told what to restore.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from statebackend._core.pulse import Pulse
from statebackend.cluster.failures import LOST_PIECES, raised
from statebackend.cluster.host import DRIVERS_LINK, PULSES_LINK, environment
from statebackend.cluster.wire import Link, LinkError, Listener, Message
from statebackend.errors import HostError

_log = logging.getLogger(__name__)


class HostLostError(HostError):
    """A host or a connection was lost: the batch can be tried again once there is another one."""

    default_code = "HOST.LOST"


class Question(NamedTuple):
    op: str
    header: Mapping[str, Any] = {}
    body: bytes = b""


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
        #: True if it was given up although its link lives: its end is unknown.
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
            hint="if the function may take so long for a batch, pass a greater batch_timeout",
        )

    def lost(self) -> HostLostError:
        return HostLostError("a host was lost", detail=repr(self))

    def heard(self, message: Message) -> None:
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
        """The seconds for which the function has run and none of its calls has returned; 0.0 if it does not run."""
        return 0.0 if self._pulse is None else self._pulse.stands_for

    def lose(self) -> None:
        """Give it up: its waiters are told."""
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


#: The host of a range is not refused for the sake of balance more often than this: where Spark lacks another slot, it
#: runs better here than not at all.
_MOST_REFUSALS = 10
#: The log tells of a function that has stood still for so many seconds, and again after as many more.
_STANDSTILL = 60.0
#: Seconds between two looks at all hosts, at most.
_LOOKS = 5.0

#: A wait for hosts or slots is logged after as many seconds, and again.
TELL = 10.0


class TooFewHostsError(HostError):
    """Hosts have not come in time: later there may be more slots."""

    default_code = "HOST.START"


class Hosts:
    """The hosts of one run of a query, ``parallelism`` of them. ``restore`` is asked of each that is new.

    A host whose pulse is silent for ``silence`` seconds is lost. A host maps ``needs_bytes`` of memory at least, 0 if
    that is not known. An executor has one host more than others at most, as far as ``num_executors`` tells how many
    there are.
    """

    def __init__(
        self,
        parallelism: int,
        secret: bytes,
        epoch: int,
        restore: Callable[[], Question],
        *,
        bind: str = "127.0.0.1",
        ports: Sequence[int] = (0,),
        silence: float = 30.0,
        needs_bytes: int = 0,
        num_executors: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.parallelism = parallelism
        self._epoch = epoch
        self._restore = restore
        self._silence = silence
        self._needs_bytes = needs_bytes
        self._num_executors = num_executors
        #: How often the host of a range was refused because its executor has its share, since there was one.
        self._crowded: Counter[int] = Counter()
        self._hosts: dict[int, RegisteredHost] = {}
        #: The ranges whose host has had its state since one was known to have died; and how those died, lately.
        self._started: set[int] = set()
        self._ends: dict[int, str] = {}
        self._generations = itertools.count(1)
        self._changed = threading.Condition()
        #: Why there are not enough hosts; and whether there never will be.
        self._failure: Exception | None = None
        self._is_over = False
        #: Called with the answer of a host that has restored; its errors are raised by the waiter for hosts.
        self.on_restored: Callable[[Answer], None] = lambda answer: None
        #: Called when a host that was ready is lost.
        self.on_loss: Callable[[], None] = lambda: None
        #: Called with the range of a host that was given up, and may never end by itself.
        self.on_hang: Callable[[int], None] = lambda number: None
        #: Called when a connection ends: True if the query has ended, and its hosts with it.
        self.has_ended: Callable[[], bool] = lambda: False
        #: Called with the range of a host that registers, and the number of its job: True while that job runs.
        self.is_job: Callable[[int, int], bool] = lambda number, job: True
        self._is_closed = threading.Event()
        self._listener = Listener(secret, self._serve, bind=bind, ports=ports)
        self._watcher = threading.Thread(target=self._watch, name="statebackend: watch of hosts", daemon=True)
        self._watcher.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where hosts register."""
        return self._listener.address

    @property
    def refused(self) -> int:
        """The connections that were none of ours."""
        return self._listener.refused

    # --- registration ---

    def _serve(self, link: Link, role: str) -> None:
        said = link.receive(self._silence).header
        if role == PULSES_LINK:
            with self._changed:
                host = self._hosts.get(said["number"])
            if host is not None and host.generation == said["generation"]:
                host.begin_pulse(link, self._silence)
            return
        why_not = self._why_not(said, role)
        share = None if why_not else self._share()
        host = None
        if why_not is None:
            with self._changed:
                before = self._hosts.get(said["number"])
                if before is not None and not before.is_lost:
                    why_not = f"range {said['number']} has a host, on executor {before.executor}"
                elif self._is_closed.is_set():
                    why_not = "the query has ended"
                elif self._is_crowded(said, share):
                    why_not = f"executor {said['executor']} has its share of hosts, {share}"
                else:
                    del self._crowded[said["number"]]
                    host = RegisteredHost(link, said, next(self._generations))
                    self._hosts[host.number] = host
        if host is None:
            _log.info("a host is refused: %s", why_not)
            link.send("refuse", why=why_not)
            return
        try:
            link.send("registered", generation=host.generation)
            # The answer comes over this link, so another thread asks.
            threading.Thread(
                target=self._begin, args=(host,), name="statebackend: restore of a host", daemon=True
            ).start()
            while not host.is_lost:
                host.heard(link.receive(None))
        except LinkError as error:
            if not host.is_lost:
                self._tell_lost(host, str(error))
        finally:
            was_ready = host.is_ready
            host.lose()
            with self._changed:
                self._changed.notify_all()
            if was_ready and not self._is_closed.is_set():
                self.on_loss()
            if host.hangs and not self._is_closed.is_set():
                self.on_hang(host.number)

    def _tell_lost(self, host: RegisteredHost, why: str) -> None:
        if not (host.was_told_to_end or self._is_closed.is_set() or self.has_ended()):
            _log.warning("%r was lost: %s", host, why)

    def _why_not(self, said: Mapping[str, Any], role: str) -> str | None:
        if role != DRIVERS_LINK or said["op"] != "register":
            return "expected a registration"
        if said["epoch"] != self._epoch:
            return f"epoch {said['epoch']} is over"
        if said["parallelism"] != self.parallelism or said["number"] not in range(self.parallelism):
            return f"range {said['number']} is outside of {said['parallelism']}"
        if not self.is_job(said["number"], said.get("job", 0)):
            return f"the job of the host has ended, of range {said['number']}"
        error = self._unfit(said)
        if error is not None:
            self._fail(error)
            return str(error)
        return None

    def _unfit(self, said: Mapping[str, Any]) -> HostError | None:
        """Why no host can run where this one is."""
        differs = differences(said["environment"])
        if differs:
            return HostError(
                "an executor has another version of the library, or another platform, than the driver",
                code="HOST.VERSION",
                detail=f"{differs}, on executor {said['executor']}",
                hint="ship one environment to all: --archives, or the same image",
            )
        limit = said["address_space"]
        if limit is not None and limit < self._needs_bytes:
            return HostError(
                "a host may not have the memory that its state may take",
                code="HOST.MEMORY",
                detail=f"{limit} bytes, and max_bytes and batch_memory come to {self._needs_bytes}, on executor "
                f"{said['executor']}",
                hint="raise spark.executor.pyspark.memory, which is shared by the cores of an executor, or lower them",
            )
        return None

    def _share(self) -> int | None:
        """How many hosts an executor may have; None if that cannot be told."""
        executors = self._num_executors()
        return None if not executors else -(-self.parallelism // executors)

    def _is_crowded(self, said: Mapping[str, Any], share: int | None) -> bool:
        there = sum(not host.is_lost and host.place == said["place"] for host in self._hosts.values())
        if share is None or there < share or self._crowded[said["number"]] >= _MOST_REFUSALS:
            return False
        self._crowded[said["number"]] += 1
        return True

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _begin(self, host: RegisteredHost) -> None:
        with host.beginning:
            while True:
                question = self._restore()
                try:
                    self.on_restored(checked(host.answer(host.ask(question), None), host))
                except HostLostError:
                    return
                except Exception as error:  # noqa: BLE001 - of many classes: the batch that waits for it raises it
                    if question != self._restore():
                        continue  # what it was to restore may be gone with the commit of the next
                    self._fail(error)
                    host.lose()
                    return
                break
            with self._changed:
                host.is_ready = True
                self._started.add(host.number)
                self._changed.notify_all()
            _log.info("%r is ready, %d of %d", host, len(self._ready()), self.parallelism)

    def fail(self, error: Exception) -> None:
        """Let whoever waits for hosts raise this error, now and later: there will be none."""
        self._is_over = True
        self._fail(error)

    def died(self, number: int, how: str) -> bool:
        """Note how the process of a host has ended; return True if a host of that range had its state."""
        with self._changed:
            self._ends[number] = how
            had_started = number in self._started
            self._started.discard(number)
            self._changed.notify_all()
        return had_started

    def forget_ends(self) -> None:
        """Forget how hosts have ended until now."""
        with self._changed:
            self._ends.clear()

    def ends(self, limit: float) -> dict[int, str]:
        """How the processes of hosts have ended, by range; waits so many seconds for the first that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends, limit)
            return dict(self._ends)

    def release(self) -> None:
        """Let all hosts end, and others come later."""
        for host in self._living():
            self._stop(host)

    def _stop(self, host: RegisteredHost) -> None:
        host.was_told_to_end = True
        try:
            host.link.send("stop")
        except LinkError:
            pass
        host.lose()

    # --- life ---

    def _watch(self) -> None:
        told: dict[RegisteredHost, int] = {}
        while not self._is_closed.wait(min(self._silence / 4, _STANDSTILL / 4, _LOOKS)):
            living = self._living()
            for host in living:
                over = host.end_of_pulse(self._silence)
                if over is not None:
                    self._tell_lost(host, f"its pulse is {over}, the timeout is {self._silence:g} s")
                    host.hangs = host.hangs or over != "closed"
                    host.lose()
            stands = {host: int(host.stands_for / _STANDSTILL) for host in living}
            for host, times in stands.items():
                if times > told.get(host, 0):
                    _log.warning(
                        "%r: no call of the function has returned for %g s", host, times * _STANDSTILL
                    )
            told = stands

    def _living(self) -> list[RegisteredHost]:
        with self._changed:
            return [host for host in self._hosts.values() if not host.is_lost]

    def wait_ready(self, limit: float) -> list[tuple[str, int]]:
        """Wait until there is a host for every range, with its state; return their addresses by range."""
        with self._changed:
            until = time.monotonic() + limit
            told_at = time.monotonic()
            while (left := until - time.monotonic()) > 0 and not self.has_ended():
                if self._changed.wait_for(
                    lambda: self._failure is not None or self.are_ready, min(left, TELL, 1.0)
                ):
                    break
                if time.monotonic() - told_at > TELL:
                    told_at = time.monotonic()
                    _log.warning(
                        "waiting for hosts: %d of %d have registered, %d have their state (%.0f of %g s)",
                        len(self._living()),
                        self.parallelism,
                        len(self._ready()),
                        limit - (until - time.monotonic()),
                        limit,
                    )
            failure = self._failure
            if not self._is_over:
                self._failure = None  # another process has its place now, and may do better
            if self.are_ready:
                return [self._hosts[number].address for number in range(self.parallelism)]
            if failure is not None:
                raise failure
            there = len(self._living())
        raise TooFewHostsError(
            "the hosts of the query have not started",
            detail=f"{there} of {self.parallelism} registered within {limit:g} s",
            hint="each takes a slot of an executor while the query runs, next to the slots of its batches: give "
            "the application more cores, or pass a smaller parallelism; the logs of executors say if hosts failed",
        )

    @property
    def are_ready(self) -> bool:
        """True if there is a host for every range, with its state."""
        return len(self._ready()) == self.parallelism

    def _ready(self) -> list[RegisteredHost]:
        return [host for host in self._living() if host.is_ready]

    # --- questions ---

    def ask_all(self, questions: Sequence[Question], limit: float | None = None) -> list[Answer]:
        """Ask every host its question; their answers by range.

        If a host is lost, `HostLostError`; if hosts answer with an error, the first error: but only when all have
        answered, or are lost, so that none is still at it.
        """
        with self._changed:
            hosts = [self._hosts[number] for number in range(self.parallelism)]
        numbers: list[int | HostLostError] = []
        for host, question in zip(hosts, questions, strict=True):
            try:
                numbers.append(host.ask(question))
            except HostLostError as error:
                numbers.append(error)
        until = None if limit is None else time.monotonic() + limit
        answers: list[Answer] = []
        lost: HostLostError | None = None
        failed: Exception | None = None
        for host, number in zip(hosts, numbers, strict=True):
            try:
                if isinstance(number, HostLostError):
                    raise number
                left = None if until is None else max(0.0, until - time.monotonic())
                answers.append(checked(host.answer(number, left), host))
            except HostLostError as error:
                lost = lost or error
            except Exception as error:  # noqa: BLE001 - of many classes
                failed = failed or error
        if failed is not None:
            raise failed
        if lost is not None:
            raise lost
        return answers

    def tell_living(self, question: Question) -> list[tuple[RegisteredHost, Answer]]:
        """Ask those that live, and do not mind who is lost meanwhile; the answers of the others."""
        asked, answers = [], []
        for host in self._living():
            try:
                asked.append((host, host.ask(question)))
            except HostLostError:
                continue
        for host, number in asked:
            try:
                answers.append((host, checked(host.answer(number, None), host)))
            except HostLostError:
                continue
            except Exception:  # noqa: BLE001 - what it holds is not what it should: another takes its place
                _log.warning("%r could not do as it was told", host, exc_info=True)
                host.lose()
        return answers

    def tell_committed(self, batch_id: int) -> None:
        """Let hosts know of a commit. One that has come since the batch ran restores what is committed now.

        If the function's listener has failed at a host, that is raised once all know.
        """
        with self._changed:
            if not self._is_over:
                # Of a host that has come since, and may not have found the checkpoint before.
                self._failure = None
        failed: Exception | None = None
        for host, answer in self.tell_living(Question("committed", {"batch": batch_id})):
            if answer["at"] != batch_id:
                with self._changed:
                    host.is_ready = False
                self._begin(host)
            elif "raised" in answer:
                failed = failed or raised(answer["raised"], repr(host))
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Let all hosts end. Idempotent."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self.release()
        self._listener.close()
        self._watcher.join()


def differences(there: Mapping[str, str]) -> str:
    """In what another process differs from this one; empty if in nothing."""
    here = environment()
    return ", ".join(
        f"{name} {there.get(name)!r} instead of {value!r}"
        for name, value in here.items()
        if there.get(name) != value
    )
