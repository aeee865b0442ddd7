"""Finds a library of RocksDB without starting a JVM, and loads it.

In this order, and the first that is there is used or refused, never passed over:

1. the file that ``STATEBACKEND_ROCKSDB_LIB`` names;
2. the one in the jar ``rocksdbjni-*.jar`` of the installed PySpark, for this system, processor and C library;
3. the system's ``librocksdb``.

What is in the jar is unpacked once, into a folder that only its owner can write: ``STATEBACKEND_ROCKSDB_CACHE``, else
``statebackend`` below the user's cache folder, else below the folder for temporary files. Code is loaded from there,
so:

* the folder belongs to this user, has mode 0700, is not a link, and is in folders where no other user can exchange it;
* the name of the file carries CRC and SHA-256 of the member of the jar, and every use compares both: a library that
  does not agree is unpacked again;
* a file gets its name when it is whole, by renaming. Processes that unpack at once write the same bytes, and either
  wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import stat
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from statebackend.errors import BackendUnavailableError

LIBRARY = "STATEBACKEND_ROCKSDB_LIB"
CACHE = "STATEBACKEND_ROCKSDB_CACHE"

_ANY_OTHER = f"install pyspark, or a librocksdb of the system, or set {LIBRARY} to one"
_STALE_SECONDS = 86_400


class Location(NamedTuple):
    """A library, where it was found: ``"environment"``, ``"pyspark"`` or ``"system"``; and its version by its name."""

    path: str
    origin: str
    #: None if no name tells it; the library itself does, once it is loaded.
    version: str | None


def find_library() -> Location:
    """Find the library to use here; raises `BackendUnavailableError` if there is none, or if it cannot be trusted.

    It looks for the file, but does not load it. O(size of the file).
    """
    named = os.environ.get(LIBRARY)
    if named:
        path = _readable(named, f"correct {LIBRARY}, or unset it")
        return Location(path, "environment", _version_of_name(path))
    looked_at: list[str] = []
    jar = _find_jar(looked_at)
    if jar is not None:
        return Location(_unpacked(jar), "pyspark", _version_of_name(jar))
    system = _find_in_system(looked_at)
    if system is not None:
        path = _readable(system, f"mend the installation, or set {LIBRARY} to another")
        return Location(path, "system", _version_of_name(path))
    raise BackendUnavailableError(
        "no library of RocksDB found",
        code="BACKEND_UNAVAILABLE.LIBRARY",
        detail=f"looked at {', '.join(looked_at)}",
        hint=_ANY_OTHER,
    )


def _binding() -> Any:
    """The module that binds the library."""
    try:
        importlib.import_module("statebackend._core.rocksdb.overlay.keyed_store")
        return importlib.import_module("statebackend._core.rocksdb.binding.library")
    except ImportError as error:
        raise BackendUnavailableError(
            f"its extension is not built ({error}); build it with 'python setup.py build_ext --inplace'",
            code="BACKEND_UNAVAILABLE.IMPORT",
        ) from error


def library_in_use() -> dict[str, str | None]:
    """Find the library, or the one that is loaded; it is not loaded here, so that the process may still fork."""
    binding = _binding()
    path = binding.loaded_path()
    if path is not None:
        return {"name": "RocksDB", "version": binding.version(), "path": path, "origin": "this process"}
    binding.check_no_other_copy()
    found = find_library()
    return {"name": "RocksDB", "version": found.version, "path": found.path, "origin": found.origin}


def load_library() -> None:
    """Load RocksDB, once for the process."""
    binding = _binding()
    if binding.loaded_path() is None:
        binding.load(find_library().path)


# ------------------------------------------------------------------------------------------------ the jar


def member_name(system: str, machine: str, libc: str) -> str | None:
    """Return the name in RocksDB's jar of the library for this platform; None if the jar has none for it."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    if system == "darwin":
        processor = {"x86_64": "x86_64", "aarch64": "arm64"}.get(machine)
        return processor and f"librocksdbjni-osx-{processor}.jnilib"
    processor = {"x86_64": "64", "aarch64": "-aarch64"}.get(machine)
    if system != "linux" or processor is None:
        return None
    return f"librocksdbjni-linux{processor}{'-musl' if libc == 'musl' else ''}.so"


def _libc() -> str:
    """Which C library the interpreter runs on."""
    try:
        return "glibc" if (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc") else "musl"
    except (AttributeError, OSError, ValueError):
        return "musl"


def _find_jar(looked_at: list[str]) -> Path | None:
    """Find RocksDB's jar; pyspark is not imported."""
    folders = []
    try:
        spec = importlib.util.find_spec("pyspark")
    except (ImportError, ValueError):  # ValueError: a module of this name without a spec
        spec = None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        # Jars of pip, and of a distribution of Spark in its folder `python`.
        folders += [Path(place, "jars"), Path(place).parents[1] / "jars"]
    if os.environ.get("SPARK_HOME"):
        folders.append(Path(os.environ["SPARK_HOME"], "jars"))
    if not folders:
        looked_at.append("pyspark, which is not installed")
    for folder in folders:
        looked_at.append(str(folder / "rocksdbjni-*.jar"))
        jars = sorted(folder.glob("rocksdbjni-*.jar"), key=_version_in)
        if jars:
            return jars[-1]
    return None


def _version_in(path: Path) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", path.name)))


def _version_of_name(path: str | os.PathLike[str]) -> str | None:
    """The version in the name of a file, or of the file that a link points to."""
    found = re.search(r"\d+(\.\d+)+", os.path.basename(os.path.realpath(path)))
    return None if found is None else found[0]


def _unpacked(jar: Path) -> str:
    """Return the path of the jar's library, checked; unpack it if it is not there, or not as it was."""
    machine, libc = platform.machine(), _libc()
    member = member_name(sys.platform, machine, libc)
    if member is None:
        _unavailable(f"{jar}: nothing for {sys.platform} on {machine}", hint=_ANY_OTHER)
    try:
        with zipfile.ZipFile(jar) as archive:
            try:
                info = archive.getinfo(member)
            except KeyError:
                _unavailable(f"{jar}: no {member}", hint=_ANY_OTHER)
            folder = _cache_folder()
            stem = f"{Path(member).stem}-{info.CRC:08x}-{info.file_size}"
            suffix = Path(member).suffix
            for path in sorted(folder.glob(f"{stem}-*{suffix}")):
                if path.name == f"{stem}-{_digest(path)}{suffix}":
                    return str(path)
                # Cut short, or changed by a process with the rights of this user.
                path.unlink(missing_ok=True)
            return _unpack(archive, info, folder, stem, suffix)
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise BackendUnavailableError(
            "the library of RocksDB cannot be unpacked",
            code="BACKEND_UNAVAILABLE.LIBRARY_CACHE",
            detail=f"from {jar}: {error}",
            hint=f"install pyspark again if the jar is damaged; else set {CACHE} to a folder with room",
        ) from error


def _unpack(archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path, stem: str, suffix: str) -> str:
    _remove_stale(folder)
    handle, temporary = tempfile.mkstemp(prefix=".unpacking-", suffix=suffix, dir=folder)
    try:
        digest = hashlib.sha256()
        with os.fdopen(handle, "wb") as file, archive.open(info) as member:  # checks the CRC at its end
            while part := member.read(1 << 20):
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o500)
        if _digest(Path(temporary)) != digest.hexdigest():
            raise OSError(f"{temporary} does not hold what was written to it")
        path = folder / f"{stem}-{digest.hexdigest()}{suffix}"
        os.replace(temporary, path)
        return str(path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_stale(folder: Path) -> None:
    """Remove what processes have left that were killed while they unpacked."""
    for path in folder.glob(".unpacking-*"):
        with contextlib.suppress(OSError):  # another process is at it too
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def _digest(path: Path) -> str:
    """SHA-256 of a regular file of this user's; of anything else, nothing that it could be compared with."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # a link, or gone
        return ""
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            return ""
        digest = hashlib.sha256()
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------- the cache folder


def _cache_folder() -> Path:
    """Return a folder that only this user can write, made if it is not there."""
    reasons = []
    for folder in _cache_candidates():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Links on the way are followed once: the file that is checked is the file that is used.
            folder = Path(os.path.realpath(folder.parent), folder.name)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            reason = _why_not_ours(folder)
            if reason is None and not os.access(folder, os.W_OK):
                reason = "cannot be written"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason is None:
            return folder
        reasons.append(f"{folder}: {reason}")
    raise BackendUnavailableError(
        "no safe folder to unpack the library of RocksDB into",
        code="BACKEND_UNAVAILABLE.LIBRARY_CACHE",
        detail="; ".join(reasons),
        hint=f"set {CACHE} to a folder that only this user can write, or {LIBRARY} to a library",
    )


def _cache_candidates() -> Iterator[Path]:
    chosen = os.environ.get(CACHE)
    if chosen:
        yield Path(chosen).absolute()
        return  # what the user has chosen is used or refused
    if sys.platform == "darwin":
        yield Path(os.path.expanduser("~/Library/Caches")) / "statebackend"
    else:
        yield (
            Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
            / "statebackend"
        )
    yield Path(tempfile.gettempdir()).absolute() / f"statebackend-{os.geteuid()}"


def _why_not_ours(folder: Path) -> str | None:
    """Say why others may have put something into the folder, or may put another in its place; None if they cannot."""
    about = os.lstat(folder)
    if not stat.S_ISDIR(about.st_mode):
        return "is a link or a file"
    if about.st_uid != os.geteuid():
        return "belongs to another user"
    if about.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(about.st_mode):o}, not 700"
    for above in Path(os.path.realpath(folder)).parents:
        about = os.stat(above)
        if about.st_uid not in (0, os.geteuid()):
            return f"{above} belongs to another user"
        if about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
            return f"{above} can be written by others"
    return None


# ---------------------------------------------------------------------------------------------- the system


def _find_in_system(looked_at: list[str]) -> str | None:
    """Find the newest librocksdb where the system keeps its libraries."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folders = [f"/usr/lib/{multiarch}"] * bool(multiarch) + ["/usr/local/lib", "/usr/lib64", "/usr/lib"]
    names = "librocksdb.so*"
    if sys.platform == "darwin":
        folders, names = ["/opt/homebrew/lib", "/usr/local/lib"], "librocksdb*.dylib"
    for folder in folders:
        looked_at.append(f"{folder}/{names}")
        found = sorted(Path(folder).glob(names), key=_version_in)
        if found:
            return str(found[-1])
    return None


# ------------------------------------------------------------------------------------------------ the file


def _unavailable(detail: str, *, hint: str) -> NoReturn:
    raise BackendUnavailableError(
        "no library of RocksDB found for this machine",
        code="BACKEND_UNAVAILABLE.LIBRARY",
        detail=detail,
        hint=hint,
    )


def _readable(path: str, hint: str) -> str:
    """Return the path if a file is there and can be read. If it is not a library, the system's loader says so later."""
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise BackendUnavailableError(
            "the library of RocksDB cannot be read",
            code="BACKEND_UNAVAILABLE.LIBRARY",
            detail=f"{path}: {error.strerror or error}",
            hint=hint,
        ) from error
