"""A disk that forgets what was not synced, and the system calls of processes on it that fail or die at will.

The disk keeps, of every file and folder, what is visible and what is durable. `Disk.after_crash` gives the disk
that a power failure leaves: of what was not synced, each name on its own is lost or kept. Nothing is kept in
order: a rename may lose its first half and keep its second, a file may be there with half of its content.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator

import pyarrow as pa

from statebackend.checkpoint.files.posix_calls import PosixCalls, Status


class Dead(BaseException):
    """The process has been killed: nothing that it does after this has any effect."""


class File:
    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = data
        #: How much of the data a failed sync has lost: it counts as written and never will be.
        self.lost = 0

    def sync(self) -> None:
        if not self.lost:
            self.durable = bytes(self.data)

    def sync_failed(self) -> None:
        self.lost = len(self.data)


class Folder:
    def __init__(self) -> None:
        self.entries: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}
        self.holder: object | None = None

    def sync(self) -> None:
        self.durable = dict(self.entries)


class Disk:
    """Folders and files below ``/``."""

    def __init__(self) -> None:
        self.root = Folder()

    def find(self, path: str) -> File | Folder:
        found: File | Folder = self.root
        for part in filter(None, path.split("/")):
            if not isinstance(found, Folder):
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
            if part not in found.entries:
                raise FileNotFoundError(errno.ENOENT, "not there", path)
            found = found.entries[part]
        return found

    def folder(self, path: str) -> Folder:
        found = self.find(path)
        if not isinstance(found, Folder):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", path)
        return found

    def file(self, path: str) -> File:
        found = self.find(path)
        if isinstance(found, Folder):
            raise IsADirectoryError(errno.EISDIR, "a folder", path)
        return found

    def parent(self, path: str) -> tuple[Folder, str]:
        folder, name = os.path.split(path)
        return self.folder(folder), name

    def walk(self) -> Iterator[str]:
        """All files and all folders, folders with a slash at the end."""
        waiting: list[tuple[str, Folder]] = [("", self.root)]
        while waiting:
            path, folder = waiting.pop()
            for name, entry in folder.entries.items():
                if isinstance(entry, Folder):
                    waiting.append((f"{path}/{name}", entry))
                    yield f"{path}/{name}/"
                else:
                    yield f"{path}/{name}"

    def after_crash(self, keeps: Callable[[], bool], how_much: Callable[[int], int]) -> Disk:
        """What a power failure leaves. Each name and content that was not synced is kept if ``keeps()``."""
        made = Disk()
        files: dict[int, File] = {}

        def survivor(file: File) -> File:
            if id(file) not in files:
                data = file.durable
                if bytes(file.data) != data and not file.lost:
                    data = bytes(file.data[: how_much(len(file.data))])
                files[id(file)] = File(data)
            return files[id(file)]

        def fill(new: Folder, old: Folder) -> None:
            for name in sorted({*old.entries, *old.durable}):
                now, then = old.entries.get(name), old.durable.get(name)
                entry = now if now is then or keeps() else then
                if isinstance(entry, Folder):
                    inner = Folder()
                    fill(inner, entry)
                    new.entries[name] = inner
                elif entry is not None:
                    new.entries[name] = survivor(entry)
            new.sync()

        fill(made.root, self.root)
        return made

    def crash(self, policy: str, seed: int = 0) -> Disk:
        """``kept``: only the process died. ``lost``: nothing but what was synced is left. ``mixed``: by chance."""
        if policy == "kept":
            return self.after_crash(lambda: True, lambda size: size)
        if policy == "lost":
            return self.after_crash(lambda: False, lambda size: 0)
        rng = random.Random(seed)
        return self.after_crash(lambda: rng.random() < 0.5, lambda size: rng.randint(0, size))


class SimulatedCalls(PosixCalls):
    """The calls of one process on a disk. ``plan(number, name)`` says what becomes of each call.

    It answers None (done), "die" (killed before it), "fail" (an error, nothing done), "lie" (done, but an error
    comes back, as over a network), or an errno to fail with.
    """

    def __init__(self, disk: Disk, plan: Callable[[int, str], object] = lambda number, name: None) -> None:
        self.disk = disk
        self.plan = plan
        self.made: list[str] = []
        self.is_dead = False
        self._files: dict[int, File | Folder] = {}
        self._next = 3

    def _begin(self, name: str) -> Callable[[], None]:
        """Ask the plan; what it returns is called once the call has been done."""
        if self.is_dead:
            raise Dead
        answer = self.plan(len(self.made), name)
        self.made.append(name)
        if answer == "die":
            self.is_dead = True
            raise Dead
        if answer == "fail":
            raise OSError(errno.EIO, "input/output error")
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer))

        def end() -> None:
            if answer == "lie":
                raise OSError(errno.EIO, "the answer was lost")

        return end

    def _opened(self, what: File | Folder) -> int:
        self._next += 1
        self._files[self._next] = what
        return self._next

    def create(self, path: str) -> int:
        end = self._begin("create")
        folder, name = self.disk.parent(path)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "there already", path)
        file = folder.entries[name] = File()
        end()
        return self._opened(file)

    def write(self, descriptor: int, data: memoryview) -> int:
        end = self._begin("write")
        file = self._files[descriptor]
        assert isinstance(file, File)
        some = data[: max(len(data) // 2, 100)]  # less than asked for, as the system may
        file.data += some
        end()
        return len(some)

    def sync(self, descriptor: int) -> None:
        file = self._files[descriptor]
        assert isinstance(file, File)
        try:
            end = self._begin("sync")
        except OSError:
            file.sync_failed()
            raise
        file.sync()
        end()

    def close(self, descriptor: int) -> None:
        if descriptor in self._files:
            what = self._files.pop(descriptor)
            if isinstance(what, Folder) and not self.is_dead:
                what.holder = None
        self._begin("close")()

    def sync_file(self, path: str) -> None:
        end = self._begin("sync_file")
        self.disk.file(path).sync()
        end()

    def sync_folder(self, path: str) -> None:
        end = self._begin("sync_folder")
        self.disk.folder(path).sync()
        end()

    def lock_folder(self, path: str) -> int:
        end = self._begin("lock_folder")
        folder = self.disk.folder(path)
        if isinstance(folder.holder, SimulatedCalls) and not folder.holder.is_dead:
            raise BlockingIOError(errno.EAGAIN, "locked", path)
        folder.holder = self
        end()
        return self._opened(folder)

    def make_folder(self, path: str) -> None:
        end = self._begin("make_folder")
        folder, name = self.disk.parent(path)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "there already", path)
        folder.entries[name] = Folder()
        end()

    def remove_folder(self, path: str) -> None:
        end = self._begin("remove_folder")
        folder, name = self.disk.parent(path)
        if self.disk.folder(path).entries:
            raise OSError(errno.ENOTEMPTY, "not empty", path)
        del folder.entries[name]
        end()

    def remove(self, path: str) -> None:
        end = self._begin("remove")
        self.disk.file(path)
        folder, name = self.disk.parent(path)
        del folder.entries[name]
        end()

    def _move(self, source: str, target: str, *, exclusive: bool, keep: bool) -> None:
        file = self.disk.file(source)
        old, old_name = self.disk.parent(source)
        new, new_name = self.disk.parent(target)
        if exclusive and new_name in new.entries:
            raise FileExistsError(errno.EEXIST, "there already", target)
        new.entries[new_name] = file
        if not keep:
            del old.entries[old_name]

    def link(self, source: str, target: str) -> None:
        end = self._begin("link")
        self._move(source, target, exclusive=True, keep=True)
        end()

    def rename(self, source: str, target: str) -> None:
        end = self._begin("rename")
        self._move(source, target, exclusive=False, keep=False)
        end()

    def rename_exclusive(self, source: str, target: str) -> None:
        end = self._begin("rename_exclusive")
        self._move(source, target, exclusive=True, keep=False)
        end()

    def names(self, path: str) -> list[str]:
        self._begin("names")()
        return list(self.disk.folder(path).entries)

    def status(self, path: str) -> Status:
        self._begin("status")()
        found = self.disk.find(path)
        return Status(isinstance(found, Folder), len(found.data) if isinstance(found, File) else 0, 1)

    def read(self, path: str) -> bytes:
        self._begin("read")()
        return bytes(self.disk.file(path).data)

    def open_input(self, path: str) -> pa.NativeFile:
        self._begin("open_input")()
        return pa.BufferReader(bytes(self.disk.file(path).data))
