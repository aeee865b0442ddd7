"""An interpreter that used the package ends silently, with status 0."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from house_tools import compiled_modules
from processes import run

import statebackend as sb

HEAVY = ("pyspark", "py4j", "pandas", "hypothesis", "pytest")


def run_silently(code: str, *arguments: object, options: Sequence[str] = ()) -> None:
    done = run(code, *arguments, options=options)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("options", [(), ("-X", "dev", "-W", "error"), ("-O", "-B", "-s")])
def test_importing_everything_compiled_is_silent(options: tuple[str, ...]) -> None:
    imports = "\n".join(f"import {name}" for name in ("statebackend", *compiled_modules()))
    run_silently(imports, options=options)


def test_importing_a_compiled_module_first_is_silent(is_stress: bool, day_rng: random.Random) -> None:
    """Each of them with ``--stress``, some of them each day otherwise."""
    modules = compiled_modules()
    for name in modules if is_stress else day_rng.sample(modules, 4):
        run_silently(f"import {name}")


def test_objects_that_outlive_their_module_are_silent() -> None:
    """At exit modules are cleared in no order that one could rely on; types kept in sys outlive theirs."""
    code = "import sys, importlib\nsys.kept = []\n"
    for name in compiled_modules():
        code += f"m = importlib.import_module({name!r}); sys.kept.append(dict(vars(m)))\n"
    run_silently(code)


def test_the_package_imports_nothing_heavy() -> None:
    code = "import sys\nfrom statebackend import types, serializers, keys, key_groups\ntypes.of('struct<a:bigint>')\n"
    run_silently(code + f"assert not set({HEAVY!r}) & set(sys.modules)")


def test_the_package_imports_without_its_compiled_core() -> None:
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {compiled_modules()!r}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import statebackend\n"
        "assert statebackend.__version__\n"
        "[getattr(statebackend, name) for name in statebackend.__all__]\n"
    )
    run_silently(code)


SNAPSHOT = """
import atexit, sys, tempfile
import statebackend as sb
folder = sys.argv[1]
keyed = sb.create_backend("heap").create_keyed_backend(int)
keyed.get_value_state(sb.ValueStateDescriptor("count", int)).update_many(range(100_000), range(100_000))
store = sb.CheckpointStore(folder).open_for_writing(key_type=int, max_parallelism=128)
"""


def read_back(folder: Path) -> list[int]:
    return sb.tools.state(folder, "count").to_table()["value"].to_pylist()


def test_an_idle_writing_thread_does_not_keep_the_interpreter(tmp_path: Path) -> None:
    code = SNAPSHOT + "store.commit(0, [keyed.snapshot(0, store).result()])\n"
    run_silently(code, tmp_path, options=("-X", "dev"))
    assert sorted(read_back(tmp_path)) == list(range(100_000))


def test_exit_waits_for_running_writes(tmp_path: Path) -> None:
    run_silently(SNAPSHOT + "pending = keyed.snapshot(0, store)\n", tmp_path)
    assert [path for path in tmp_path.glob("data/*/*.arrow") if path.stat().st_size > 100_000]


def test_a_checkpoint_of_another_thread_while_what_is_being_written_is_waited_for(tmp_path: Path) -> None:
    code = """
import threading, time
import concurrent.futures.thread as pool
go = threading.Event()
keyed._threads.run(go.wait)
def at_the_end():
    try:
        while not pool._shutdown:
            time.sleep(0.001)
        store.commit(0, [keyed.snapshot(0, store).result()])
    finally:
        go.set()
threading.Thread(target=at_the_end).start()
"""
    run_silently(SNAPSHOT + code, tmp_path)
    assert sorted(read_back(tmp_path)) == list(range(100_000))


def test_a_last_checkpoint_when_the_interpreter_is_about_to_end(tmp_path: Path) -> None:
    code = "atexit.register(lambda: store.commit(1, [keyed.snapshot(1, store).result()]))\n"
    for before in ("", "store.commit(0, [keyed.snapshot(0, store).result()])\n"):
        folder = tmp_path / str(len(before))
        run_silently(SNAPSHOT + before + code, folder)
        assert sb.CheckpointStore(folder).latest() == 1
        assert sorted(read_back(folder)) == list(range(100_000))
