"""An object store in memory, and the requests of clients to it that fail, die, lie or come late at will.

An object appears, whole, when it is put or its upload is closed; there are no folders but those that names imply.
"""

from __future__ import annotations

import errno
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

from simulated_disk import Dead

from statebackend.checkpoint.files.object_calls import PART_SIZE, ObjectCalls, ObjectStatus
from statebackend.checkpoint.files.store_files import BytesLike

T = TypeVar("T")
Plan = Callable[[int, str], object]

_buckets: weakref.WeakValueDictionary[int, Bucket] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def nothing(number: int, name: str) -> object:
    """The plan by which all goes well."""
    return None


class Bucket:
    """What all clients see. A pickled one is the same one, in the same process."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        #: What its clock shows, in seconds since 1970.
        self.now = 1_700_000_000.0
        #: Requests that have been sent and not been carried out, each with the client that gave up on it.
        self.late: list[tuple[SimulatedObjectCalls, Callable[[], object]]] = []
        self.lock = threading.RLock()
        self.number = next(_numbers)
        _buckets[self.number] = self

    def __reduce__(self) -> tuple[object, ...]:
        return _bucket, (self.number,)

    def write(self, name: str, content: bytes) -> None:
        self.objects[name] = content
        self.times[name] = self.now

    def arrive(self, but: SimulatedObjectCalls | None = None) -> None:
        """Carry out the late requests of all clients but one. Nobody hears of their outcome."""
        waiting, self.late = self.late, [each for each in self.late if each[0] is but]
        for client, request in waiting:
            if client is not but:
                try:
                    request()
                except OSError:
                    pass  # refused


def _bucket(number: int) -> Bucket:
    return _buckets[number]


class SimulatedObjectCalls(ObjectCalls):
    """The requests of one process. ``plan(number, name)`` says what becomes of each.

    It answers None (done), "die" (killed before it), "fail" (an error, nothing done), "lie" (done, but the answer is
    lost), "late" (a time-out; it is carried out after the next request of another client), or an errno to fail with.
    With ``conditional=False`` the service ignores the condition of a create.
    """

    def __init__(
        self, bucket: Bucket, plan: Plan = nothing, *, conditional: bool = True, part_size: int = PART_SIZE
    ) -> None:
        super().__init__("s3://simulated")
        self.bucket = bucket
        self.plan = plan
        self.conditional = conditional
        self.part_size = part_size
        self.made: list[str] = []
        self.is_dead = False

    def __reduce__(self) -> tuple[object, ...]:
        return SimulatedObjectCalls, (self.bucket, self.plan)

    def request(self, name: str, carry_out: Callable[[], T]) -> T:
        with self.bucket.lock:
            if self.is_dead:
                raise Dead
            answer = self.plan(len(self.made), name)
            self.made.append(name)
            if answer == "die":
                self.is_dead = True
                raise Dead
            if answer == "fail":
                raise OSError("service unavailable")
            if isinstance(answer, int):
                raise OSError(answer, "no such request")
            if answer == "late":
                self.bucket.late.append((self, carry_out))
                raise OSError("timed out")
            try:
                found = carry_out()
            except OSError:
                if answer != "lie":
                    raise
            self.bucket.arrive(but=self)
            if answer == "lie":
                raise OSError("the answer was lost")
            return found

    def _there(self, name: str) -> bytes:
        if name not in self.bucket.objects:
            raise FileNotFoundError(errno.ENOENT, "no such object", name)
        return self.bucket.objects[name]

    def put(self, name: str, content: bytes) -> None:
        self.request("put", lambda: self.bucket.write(name, content))

    def create(self, name: str, content: bytes) -> None:
        def carry_out() -> None:
            if self.conditional and name in self.bucket.objects:
                raise FileExistsError(errno.EEXIST, "an object of this name exists", name)
            self.bucket.write(name, content)

        self.request("create", carry_out)

    def head(self, name: str) -> ObjectStatus:
        return self.request("head", lambda: ObjectStatus(len(self._there(name)), self.bucket.times[name]))

    def get(self, name: str) -> bytes:
        return self.request("get", lambda: self._there(name))

    def get_range(self, name: str, start: int, end: int) -> BytesLike:
        return self.request("range", lambda: self._there(name)[start:end])

    def names(self, folder: str) -> list[str]:
        def carry_out() -> list[str]:
            start = folder + "/" if folder else ""
            return list({n[len(start) :].split("/")[0] for n in self.bucket.objects if n.startswith(start)})

        return self.request("list", carry_out)

    def names_below(self, folder: str) -> list[str]:
        return self.request(
            "list_all", lambda: [name for name in self.bucket.objects if name.startswith(folder + "/")]
        )

    def delete(self, name: str) -> None:
        def carry_out() -> None:
            self._there(name)
            del self.bucket.objects[name], self.bucket.times[name]

        self.request("delete", carry_out)

    def copy(self, name: str, other: str) -> None:
        self.request("copy", lambda: self.bucket.write(other, self._there(name)))

    def open_writer(self, name: str) -> SimulatedUpload:
        return SimulatedUpload(self, name)


class SimulatedUpload:
    """One PUT, or parts that nobody sees until it is closed."""

    def __init__(self, calls: SimulatedObjectCalls, name: str) -> None:
        self._calls = calls
        self._name = name
        self._parts: list[bytes] = []
        self._held = b""

    def write(self, data: BytesLike) -> None:
        self._held += bytes(data)
        size = self._calls.part_size
        while len(self._held) > size:
            part, self._held = self._held[:size], self._held[size:]
            self._calls.request("part", lambda part=part: self._parts.append(part))  # type: ignore[misc]

    def close(self) -> None:
        content = b"".join([*self._parts, self._held])
        name = "complete" if self._parts else "put"
        self._calls.request(name, lambda: self._calls.bucket.write(self._name, content))
