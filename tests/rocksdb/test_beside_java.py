"""RocksDB's own Java library in the same process, before ours and after it."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run

import statebackend as sb
from statebackend.backends.rocksdb import library_location

#: Places of functions in JNI's table.
_FIND_CLASS, _GET_METHOD, _GET_STATIC_METHOD = 6, 33, 113
_CALL_VOID, _CALL_STATIC_OBJECT, _CALL_STATIC_VOID = 63, 116, 143
_NEW_STRING, _NEW_BYTES, _SET_BYTES, _EXCEPTION_CHECK, _EXCEPTION_DESCRIBE = 167, 176, 208, 228, 16
_JNI_1_8 = 0x00010008


class _Option(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char_p), ("extra", ctypes.c_void_p)]


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("options", ctypes.POINTER(_Option)),
        ("ignore", ctypes.c_uint8),
    ]


def find_libjvm() -> Path | None:
    """The library of the installed JVM."""
    java = shutil.which("java")
    if java is None:
        return None
    found = Path(os.path.realpath(java)).parents[1] / "lib" / "server" / "libjvm.so"
    return found if found.exists() else None


class JavaRocksDb:
    """RocksDB's JNI in a JVM of this process, with a database in a folder."""

    def __init__(self, jar: Path, folder: Path) -> None:
        path = find_libjvm()
        assert path is not None
        library = ctypes.CDLL(str(path))
        given = [f"-Djava.class.path={jar}", "-Xmx64m", "-Xrs", f"-Djava.io.tmpdir={folder}"]
        options = (_Option * len(given))(*(_Option(each.encode(), None) for each in given))
        arguments = _Arguments(_JNI_1_8, len(given), options, 0)
        vm, self._env = ctypes.c_void_p(), ctypes.c_void_p()
        failed = library.JNI_CreateJavaVM(ctypes.byref(vm), ctypes.byref(self._env), ctypes.byref(arguments))
        assert not failed, failed
        self._table = ctypes.cast(self._env, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
        self._class = self._call(_FIND_CLASS, b"org/rocksdb/RocksDB")
        load = self._call(_GET_STATIC_METHOD, self._class, b"loadLibrary", b"()V")
        self._call(_CALL_STATIC_VOID, self._class, load, None, result=None)
        opening = b"(Ljava/lang/String;)Lorg/rocksdb/RocksDB;"
        open_it = self._call(_GET_STATIC_METHOD, self._class, b"open", opening)
        text = self._call(_NEW_STRING, str(folder / "of-java").encode())
        self._db = self._call(_CALL_STATIC_OBJECT, self._class, open_it, (ctypes.c_void_p * 1)(text))

    def _call(self, place: int, *arguments: Any, result: Any = ctypes.c_void_p) -> Any:
        given = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments]
        found = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *_types_of(given))(self._table[place])(
            self._env, *given
        )
        check = ctypes.CFUNCTYPE(ctypes.c_uint8, ctypes.c_void_p)(self._table[_EXCEPTION_CHECK])
        if check(self._env):
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._table[_EXCEPTION_DESCRIBE])(self._env)
            raise RuntimeError("an exception in Java")
        return found

    def _bytes(self, data: bytes) -> Any:
        array = self._call(_NEW_BYTES, ctypes.c_int32(len(data)))
        where = (ctypes.c_int32(0), ctypes.c_int32(len(data)))
        self._call(_SET_BYTES, array, *where, data, result=None)
        return array

    def put(self, key: bytes, value: bytes) -> None:
        put = self._call(_GET_METHOD, self._class, b"put", b"([B[B)V")
        self._call(
            _CALL_VOID,
            self._db,
            put,
            (ctypes.c_void_p * 2)(self._bytes(key), self._bytes(value)),
            result=None,
        )

    def close(self) -> None:
        self._call(
            _CALL_VOID, self._db, self._call(_GET_METHOD, self._class, b"close", b"()V"), None, result=None
        )


def _types_of(given: list[Any]) -> list[Any]:
    return [
        ctypes.c_char_p if isinstance(each, bytes) else ctypes.c_void_p if each is None else type(each)
        for each in given
    ]


pytestmark = pytest.mark.skipif(
    find_libjvm() is None or sys.platform != "linux", reason="needs a JVM's libjvm.so"
)


def java(jar: Path, folder: Path) -> JavaRocksDb:
    made = JavaRocksDb(jar, folder)
    for number in range(2000):
        made.put(b"%d" % number, b"x" * 100)
    return made


def ours(folder: Path) -> tuple[Any, Any]:
    keyed = sb.create_backend("rocksdb", local_dir=folder).create_keyed_backend(int)
    state = keyed.get_value_state(sb.ValueStateDescriptor("v", str))
    work(keyed, state)
    return keyed, state


def work(keyed: Any, state: Any) -> None:
    state.update_many(list(range(2000)), ["x" * 100] * 2000)
    keyed.scratch.database.flush()
    assert state.get_many([1, 1999]).to_pylist() == ["x" * 100] * 2


def run_beside(tmp_path: Path, code: str) -> str:
    jar = library_location._find_jar([])
    assert jar is not None
    done = run(sys.modules[__name__], code, jar, tmp_path)
    assert done.stderr == ""
    return done.stdout


def test_after_java_ours_is_refused(tmp_path: Path) -> None:
    """Two copies cannot be kept apart, so it says so instead of trying."""
    told = run_beside(
        tmp_path,
        """
java(jar, folder)
print(sb.available_backends()["rocksdb"].reason)
try:
    ours(folder)
except sb.errors.BackendUnavailableError as error:
    print(error.code)
""",
    )
    reason, code = told.splitlines()
    assert "another copy of RocksDB" in reason
    assert code == "BACKEND_UNAVAILABLE.OTHER_LIBRARY"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ending",
    ["", "theirs.close()", "keyed.close()", "theirs.close(); keyed.close()", "keyed.close(); theirs.close()"],
)
def test_before_java_both_work_and_end_in_any_order(tmp_path: Path, ending: str) -> None:
    code = """
keyed, state = ours(folder)
theirs = java(jar, folder)
work(keyed, state)
theirs.put(b"more", b"x" * 100)
work(keyed, state)
print("both")
"""
    assert run_beside(tmp_path, code + ending) == "both\n"
    assert not list(tmp_path.glob("statebackend-rocksdb-*"))


if __name__ == "__main__":  # the program: code over the functions above
    jar, folder = Path(sys.argv[2]), Path(sys.argv[3])
    exec(sys.argv[1])
