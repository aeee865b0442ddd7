"""An object store in memory, as an Arrow file system, whose calls fail or die at will.

An object appears, whole, when its stream is closed; there are no folders but those that names imply.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow as pa
from pyarrow import fs
from simulated_disk import Dead


class Bucket:
    """What all clients see."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}


class Client(fs.FileSystemHandler):  # type: ignore[misc]
    """One process. ``plan(number, name)`` answers None, "die", "fail" or "lie" for each call."""

    def __init__(
        self, bucket: Bucket, plan: Callable[[int, str], object] = lambda number, name: None
    ) -> None:
        self.bucket = bucket
        self.plan = plan
        self.made: list[str] = []
        self.is_dead = False

    def begin(self, name: str) -> Callable[[], None]:
        if self.is_dead:
            raise Dead
        answer = self.plan(len(self.made), name)
        self.made.append(name)
        if answer == "die":
            self.is_dead = True
            raise Dead
        if answer == "fail":
            raise OSError("service unavailable")

        def end() -> None:
            if answer == "lie":
                raise OSError("the answer was lost")

        return end

    def _info(self, path: str) -> fs.FileInfo:
        if path in self.bucket.objects:
            return fs.FileInfo(path, fs.FileType.File, size=len(self.bucket.objects[path]))
        is_folder = any(name.startswith(path + "/") for name in self.bucket.objects)
        return fs.FileInfo(path, fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        end = self.begin("head")
        found = [self._info(path) for path in paths]
        end()
        return found

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        end = self.begin("list")
        start = selector.base_dir + "/"
        inside = {n[len(start) :].split("/")[0] for n in self.bucket.objects if n.startswith(start)}
        end()
        return [self._info(start + name) for name in sorted(inside)]

    def delete_file(self, path: str) -> None:
        end = self.begin("delete")
        if path not in self.bucket.objects:
            raise FileNotFoundError(path)
        del self.bucket.objects[path]
        end()

    def delete_dir(self, path: str) -> None:
        end = self.begin("delete_folder")
        for name in [name for name in self.bucket.objects if name.startswith(path + "/")]:
            del self.bucket.objects[name]
        end()

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        self.begin("open")()
        return pa.PythonFile(Upload(self, path), "w")

    def open_input_file(self, path: str) -> pa.NativeFile:
        end = self.begin("get")
        if path not in self.bucket.objects:
            raise FileNotFoundError(path)
        end()
        return pa.BufferReader(self.bucket.objects[path])

    open_input_stream = open_input_file

    def get_type_name(self) -> str:
        return "simulated"

    def normalize_path(self, path: str) -> str:
        return path

    def _never(self, *arguments: object) -> None:
        raise AssertionError("a store does not do this in an object store")

    create_dir = delete_dir_contents = delete_root_dir_contents = move = copy_file = open_append_stream = (
        _never
    )


class Upload(io.BytesIO):
    def __init__(self, client: Client, path: str) -> None:
        super().__init__()
        self._client = client
        self._path = path

    def write(self, data: object) -> int:
        end = self._client.begin("part")
        written = super().write(data)  # type: ignore[arg-type]
        end()
        return written

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            if not self._client.is_dead:
                end = self._client.begin("put")
                self._client.bucket.objects[self._path] = content
                end()
