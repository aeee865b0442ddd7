"""Gets what the Flink peer needs: a JDK that is there, Flink's jar from its wheel, and our compiled classes.

The cache folder is ``<repository>/.cache/flink``, or what ``STATEBACKEND_FLINK_CACHE`` names. Everything in
it is made in a folder of its own and renamed into place, so that two runs at once cannot see half of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FLINK_VERSION = "2.3.0"
_REQUIREMENT = f"apache-flink-libraries=={FLINK_VERSION}"
# The distribution jar holds the runtime and everything it needs; without a logging back end SLF4J stays
# silent.
_JARS = (f"flink-dist-{FLINK_VERSION}.jar",)
_MINIMUM_JAVA = 17
_SOURCES = Path(__file__).parent / "java"
_DOWNLOAD_TIMEOUT = 1800.0
_COMPILE_TIMEOUT = 300.0


class PeerUnavailable(Exception):
    """The Flink peer cannot run here; ``reason`` says why and what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Installation:
    """What it takes to start a JVM with the peer in it."""

    java: Path
    classpath: str


def default_cache() -> Path:
    """Return the cache folder: ``STATEBACKEND_FLINK_CACHE``, or ``.cache/flink`` in the repository."""
    named = os.environ.get("STATEBACKEND_FLINK_CACHE")
    return Path(named) if named else Path(__file__).resolve().parents[2] / ".cache" / "flink"


def install(cache: Path, download: bool) -> Installation:
    """Return an installation, making what is missing; raise ``PeerUnavailable`` if something cannot be had.

    The first call downloads a wheel of about 330 MB, unless ``download`` is false, and compiles. Later ones
    take milliseconds.
    """
    java, javac = _find_tool("java"), _find_tool("javac")
    # The JVM is started in another folder than this process.
    cache = cache.resolve()
    try:
        jars = _jars(cache, download)
        classes = _classes(cache, javac, jars)
    except OSError as error:
        raise PeerUnavailable(f"the cache folder cannot be used: {error}") from error
    return Installation(java, os.pathsep.join(str(path) for path in (classes, *jars)))


def _find_tool(name: str) -> Path:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(name, path=str(Path(home) / "bin")) if home else None
    found = found or shutil.which(name)
    advice = f"install a JDK of version {_MINIMUM_JAVA} or later, or set JAVA_HOME to one"
    if found is None:
        raise PeerUnavailable(f"no {name} found: {advice}")
    answer = _run([found, "-version"], timeout=60.0)
    # "javac 17.0.15", or 'openjdk version "17.0.15"'; before version 9 it was "1.8".
    version = re.search(r'(?:javac |version ")(?:1\.)?(\d+)', answer.stdout + answer.stderr)
    if answer.returncode != 0 or version is None:
        raise PeerUnavailable(f"{name} does not run: {advice}")
    if int(version.group(1)) < _MINIMUM_JAVA:
        raise PeerUnavailable(f"{name} is version {version.group(1)}: {advice}")
    return Path(found).absolute()


def _jars(cache: Path, download: bool) -> list[Path]:
    folder = cache / f"flink-{FLINK_VERSION}"
    if not folder.is_dir():
        if not download:
            raise PeerUnavailable(
                f"Flink {FLINK_VERSION} is not in the cache: `python -m bench.flink prepare` downloads it"
            )
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
            _unpack(_download(Path(making) / "wheel"), Path(making) / "jars")
            _move_into_place(Path(making) / "jars", folder)
    jars = [folder / name for name in _JARS]
    missing = [jar.name for jar in jars if not jar.is_file()]
    if missing:
        raise PeerUnavailable(
            f"the cache lacks {', '.join(missing)}: delete its folder {folder.name} and try again"
        )
    return jars


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), _REQUIREMENT]
    try:
        done = _run(command, timeout=_DOWNLOAD_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"pip download of {_REQUIREMENT} took too long") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise PeerUnavailable(f"pip download of {_REQUIREMENT} failed: {_last_line(done.stderr)}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in _JARS:
                with archive.open(f"pyflink/lib/{name}") as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PeerUnavailable(f"the wheel {wheel.name} is not as expected: {error}") from error


def _classes(cache: Path, javac: Path, jars: list[Path]) -> Path:
    """Compile the sources, once for each content they have had."""
    sources = sorted(_SOURCES.rglob("*.java"))
    stamp = hashlib.sha256(FLINK_VERSION.encode())
    for source in sources:
        stamp.update(source.relative_to(_SOURCES).as_posix().encode() + b"\0")
        stamp.update(source.read_bytes() + b"\0")
    folder = cache / f"classes-{stamp.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
        made = Path(making) / "classes"
        command = [str(javac), "--release", str(_MINIMUM_JAVA), "-proc:none", "-Xlint:all", "-d", str(made)]
        command += ["-classpath", os.pathsep.join(map(str, jars)), *map(str, sources)]
        done = _run(command, timeout=_COMPILE_TIMEOUT)
        if done.returncode != 0:
            # Not a lack of something on this machine: our sources are wrong, and a bench must not skip that.
            raise RuntimeError(f"the Java sources of the Flink peer do not compile:\n{done.stderr}")
        _move_into_place(made, folder)
    return folder


def _move_into_place(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)
    except OSError:
        # Another run was faster; what it made is the same.
        if not folder.is_dir():
            raise


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
