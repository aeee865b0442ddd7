"""What the backend says of itself before anything is loaded: which library, which version, or why not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from processes import run

import statebackend as sb
from statebackend._core.rocksdb.binding import library
from statebackend.backends.rocksdb.library_location import LIBRARY, find_library
from statebackend.backends.rocksdb.scratch import background_work, stalls

ASKING = """
import os, sys
import statebackend as sb
found = sb.available_backends()["rocksdb"]
print(found.is_available, found.reason)
print(*(found.library or {}).values(), sep="|")
from statebackend._core.rocksdb.binding.library import loaded_path
assert loaded_path() is None
assert not any("rocksdb" in os.path.basename(line.split()[-1]) and ".so" in line and "jni" in line
               for line in open("/proc/self/maps")), "mapped"
"""


def ask(**environment: str) -> list[str]:
    done = run(ASKING, variables=environment)
    return done.stdout.splitlines()


def test_the_library_of_pyspark_and_its_version() -> None:
    """By the name of the jar; and the library itself says the same."""
    told = ask()
    assert told[0] == "True None"
    name, version, path, origin = told[1].split("|")
    assert (name, origin, path) == ("RocksDB", "pyspark", find_library().path)
    library.load(path)
    assert version == library.version()
    found = sb.available_backends()["rocksdb"].library
    assert found == {"name": "RocksDB", "version": version, "path": path, "origin": "this process"}


def test_the_library_that_the_user_names(tmp_path: Path) -> None:
    path = tmp_path / "librocksdb.so"
    shutil.copy(find_library().path, path)
    assert ask(**{LIBRARY: str(path)}) == ["True None", f"RocksDB|None|{path}|environment"]
    (tmp_path / "librocksdb.so.9.8.4").symlink_to(path)
    path.rename(tmp_path / "librocksdb.so.9.8.40")
    (tmp_path / "librocksdb.so").symlink_to(tmp_path / "librocksdb.so.9.8.40")
    assert ask(**{LIBRARY: str(path)}) == ["True None", f"RocksDB|9.8.40|{path}|environment"]


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    told = ask(**{LIBRARY: str(tmp_path / "nowhere.so")})
    assert told[0].startswith("False the library of RocksDB cannot be read")
    assert told[1] == ""


def test_a_factory_and_a_question_do_not_keep_a_process_from_forking() -> None:
    done = run(
        """
import os
import statebackend as sb
assert sb.available_backends()["rocksdb"].is_available
backend = sb.create_backend("rocksdb")
child = os.fork()
with backend.create_keyed_backend(int) as keyed:
    keyed.get_value_state(sb.ValueStateDescriptor("v", int)).update_many([1], [2])
    os.write(1, b"%d\\n" % keyed.num_entries("v"))  # at once: both write
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    )
    assert done.stdout == "1\n1\n"


def test_figures_of_work_in_the_background(tmp_path: Path) -> None:
    """RocksDB's own text is still read: it has what was done."""
    with sb.create_backend("rocksdb", memory_limit=4 << 20, local_dir=tmp_path).create_keyed_backend(
        int
    ) as keyed:
        state = keyed.get_value_state(sb.ValueStateDescriptor("v", bytes))
        figures = keyed.metrics()["states"]["v"]
        assert (figures["flushes"], figures["compactions"]) == (0, 0)
        rows = [os.urandom(500) for _ in range(2000)]
        for _ in range(12):
            state.update_many(list(range(2000)), rows)
            keyed.scratch.database.flush()
        keyed.scratch.database.wait_for_compactions()
        metrics = keyed.metrics()
        figures = metrics["states"]["v"]
        assert figures["flushes"] >= 12
        assert figures["compactions"] >= 1
        assert figures["stalls"] == {"delays": 0, "stops": 0}
        assert sum(figures["files_by_level"]) >= 1
        assert figures["sst_bytes"] > 2000 * 500 / 2
        assert figures["pending_compaction_bytes"] >= 0
        assert metrics["write_stalls"] == {"by_memory": 0, "is_stopped": False, "delayed_bytes_per_second": 0}
        assert metrics["background_errors"] == 0


def test_figures_that_a_version_does_not_report_are_none() -> None:
    unknown = {"flushes": None, "compactions": None}
    assert background_work(None) == background_work("Priority Files\n---\n Low 1\n") == unknown
    assert stalls("something else") == {"delays": None, "stops": None}


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"memory_limit": each}
            for each in (-1, 0, True, 5e6, "1 gib", "1m", (4 << 20) - 1, 1 << 62, 1 << 70)
        ),
        *({"local_dir": each} for each in (5, b"/tmp", "", "a\0b", ["/tmp"])),
        *({"predefined": each} for each in (None, [], "default", 5)),
        *({"compression": each} for each in ([], 5, "LZ4")),
        {"partitioned_index_filters": 1},
        {"nothing": 1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_before_anything_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(sb.errors.UsageError) as error:
        sb.create_backend("rocksdb", **options)
    assert next(iter(options)) in str(error.value) or "predefined" in options or "compression" in options


@pytest.mark.parametrize("parent", ["missing", "file", "x" * 300])
def test_a_folder_in_which_none_can_be_made_is_named(tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(sb.errors.StoreError, match="local_dir=") as error:
        sb.create_backend("rocksdb", local_dir=tmp_path / parent).create_keyed_backend(int)
    assert str(tmp_path / parent) in str(error.value)
    assert error.value.code == "STORE.DATABASE"
