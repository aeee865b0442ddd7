"""Where the library comes from, and what is refused on the way."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import zipfile
from pathlib import Path

import pytest
from processes import run, started
from rocks import PRELUDE

from statebackend.backends.rocksdb import library_location
from statebackend.backends.rocksdb.library_location import CACHE, LIBRARY, Location, find_library
from statebackend.errors import BackendUnavailableError

#: Of a file that is found, and is not loaded here.
CONTENT = os.urandom(200_000)
MEMBER = library_location.member_name(sys.platform, platform.machine(), library_location._libc()) or "none"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(LIBRARY, raising=False)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of jars of a PySpark that is found in the place of the installed one."""
    jars = tmp_path / "site" / "pyspark" / "jars"
    jars.mkdir(parents=True)
    (jars.parent / "__init__.py").write_text("raise SystemExit('pyspark was imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.delitem(sys.modules, "pyspark", raising=False)
    return jars


def make_jar(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as jar:
        for name, content in members.items():
            jar.writestr(name, content)


def refused(code: str) -> BackendUnavailableError:
    with pytest.raises(BackendUnavailableError) as error:
        find_library()
    assert error.value.code == f"BACKEND_UNAVAILABLE.{code}"
    assert error.value.detail
    assert error.value.hint
    return error.value


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")


def test_the_installed_jar_has_one(cache: Path) -> None:
    found = find_library()
    assert found.origin == "pyspark"
    assert Path(found.path).parent == cache
    assert cache.stat().st_mode & 0o777 == 0o700
    assert Path(found.path).stat().st_mode & 0o777 == 0o500
    assert find_library() == found
    assert [path.name for path in cache.iterdir()] == [Path(found.path).name]


def test_the_variable_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.so").write_bytes(CONTENT)
    monkeypatch.setenv(LIBRARY, str(tmp_path / "mine.so"))
    assert find_library() == Location(str(tmp_path / "mine.so"), "environment", None)
    monkeypatch.setenv(LIBRARY, str(tmp_path / "missing.so"))
    assert "missing.so" in str(refused("LIBRARY").detail)


def test_pyspark_is_found_without_importing_it(cache: Path, spark: Path) -> None:
    make_jar(spark / "rocksdbjni-9.8.4.jar", **{MEMBER: CONTENT})
    make_jar(spark / "rocksdbjni-9.10.0.jar", **{MEMBER: CONTENT + b"newer"})
    found = find_library()
    assert found.origin == "pyspark"
    assert Path(found.path).read_bytes() == CONTENT + b"newer"


def test_a_distribution_of_spark(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: Path
) -> None:
    (tmp_path / "spark" / "jars").mkdir(parents=True)
    make_jar(tmp_path / "spark" / "jars" / "rocksdbjni-9.8.4.jar", **{MEMBER: CONTENT})
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))
    assert find_library().origin == "pyspark"


def test_a_jar_that_is_damaged_or_without_this_platform(cache: Path, spark: Path) -> None:
    jar = spark / "rocksdbjni-9.8.4.jar"
    make_jar(jar, **{"librocksdbjni-vax.so": b""})
    assert jar.name in str(refused("LIBRARY").detail)
    jar.write_bytes(b"no archive")
    assert str(jar) in str(refused("LIBRARY_CACHE").detail)
    make_jar(jar, **{MEMBER: os.urandom(100_000)})
    content = bytearray(jar.read_bytes())
    content[50_000] ^= 0xFF
    jar.write_bytes(content)
    refused("LIBRARY_CACHE")
    assert list(cache.iterdir()) == []


def test_without_any_library(cache: Path, spark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        library_location, "_find_in_system", lambda looked_at: looked_at.append("/usr/lib/librocksdb.so*")
    )
    error = refused("LIBRARY")
    assert str(spark / "rocksdbjni-*.jar") in str(error.detail)
    assert "/usr/lib/librocksdb.so*" in str(error.detail)
    assert "pyspark" in str(error.hint)


@pytest.mark.parametrize(
    "how", ["changed", "cut short", "appended to", "replaced by a link", "writable by others"]
)
def test_altered_library_is_unpacked_again(cache: Path, spark: Path, tmp_path: Path, how: str) -> None:
    make_jar(spark / "rocksdbjni-9.8.4.jar", **{MEMBER: CONTENT})
    path = Path(find_library().path)
    if how == "replaced by a link":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    elif how == "writable by others":
        path.chmod(0o777)
    else:
        path.chmod(0o700)
        contents = {"changed": b"\0" + CONTENT[1:], "cut short": CONTENT[:-1], "appended to": CONTENT + b"x"}
        path.write_bytes(contents[how])
        path.chmod(0o500)
    assert find_library().path == str(path)
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o500
    assert path.read_bytes() == CONTENT


def test_the_name_must_fit_the_jar(cache: Path, spark: Path) -> None:
    """A file whose name has its own digest, but the numbers of another member, is not the jar's."""
    make_jar(spark / "rocksdbjni-9.8.4.jar", **{MEMBER: CONTENT})
    first = Path(find_library().path)
    make_jar(spark / "rocksdbjni-9.8.4.jar", **{MEMBER: CONTENT + b"another"})
    second = Path(find_library().path)
    assert first != second
    assert second.read_bytes() == CONTENT + b"another"


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_look_into_or_write(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    error = refused("LIBRARY_CACHE")
    assert f"has mode {mode:o}" in str(error.detail)
    assert CACHE in str(error.hint)


def test_a_folder_that_is_a_link_or_of_another_user_or_cannot_be_made(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "real")
    assert "is a link" in str(refused("LIBRARY_CACHE").detail)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file" / "cache") in str(refused("LIBRARY_CACHE").detail)
    if os.geteuid() == 0:  # who may give a folder to another user
        monkeypatch.setenv(CACHE, str(tmp_path / "real"))
        os.chown(tmp_path / "real", 12_345, -1)
        assert "belongs to another user" in str(refused("LIBRARY_CACHE").detail)


def test_a_link_on_the_way_to_the_folder_is_followed_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the link could lead to another folder once this one is found to be safe."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv(CACHE, str(tmp_path / "link" / "cache"))
    for _ in range(2):  # unpacked, and found
        assert Path(find_library().path).parent == tmp_path / "real" / "cache"


def test_a_folder_in_one_that_others_can_write(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv(CACHE, str(tmp_path / "shared" / "cache"))
    assert "can be written by others" in str(refused("LIBRARY_CACHE").detail)
    (tmp_path / "shared").chmod(0o1777)
    assert find_library().origin == "pyspark"


def test_without_a_home_the_folder_for_temporary_files(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(library_location.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert Path(find_library().path).parent == tmp_path / "tmp" / f"statebackend-{os.geteuid()}"


def test_files_of_killed_processes_are_removed(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    old, new = cache / ".unpacking-old.so", cache / ".unpacking-new.so"
    old.write_text("")
    new.write_text("")
    os.utime(old, (0, 0))
    find_library()
    assert not old.exists()
    assert new.exists()


def test_four_processes_at_once(cache: Path) -> None:
    code = (
        "from statebackend.backends.rocksdb.library_location import find_library\nprint(find_library().path)"
    )
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(code)) for _ in range(4)]
        paths = {process.communicate(timeout=120)[0].strip() for process in processes}
        assert [process.returncode for process in processes] == [0] * 4
    assert paths == {find_library().path}
    assert [str(path) for path in cache.iterdir()] == list(paths)


def test_the_systems_library_comes_last(
    cache: Path, spark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_location.sysconfig, "get_config_var", lambda name: "../.." + str(tmp_path))
    for name in ("librocksdb.so.8.9.1", "librocksdb.so.10.2"):
        (tmp_path / name).write_bytes(CONTENT)
    found = find_library()
    assert found.origin == "system"
    assert found.path.endswith("librocksdb.so.10.2")


def test_the_unpacked_library_loads(cache: Path) -> None:
    done = run(PRELUDE + "from statebackend._core.rocksdb.binding import library; print(library.version())")
    assert done.stdout.strip() != "unknown"
