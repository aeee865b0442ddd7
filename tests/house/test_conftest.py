"""The suite's own safety net: it finds leaks, repeats itself, and refuses the wrong build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house_tools import ROOT

#: Stands in for the compiled core: an object counts as alive until it is collected.
FAKE = """
import sys, types
alive = 0
class Thing:
    def __init__(self):
        global alive
        alive += 1
    def __del__(self):
        global alive
        alive -= 1
arena = types.ModuleType("statebackend._core.memory.arena")
arena.live_counters = lambda: {"things": alive, "others": 0}
arena.is_checked_build = lambda: True
sys.modules[arena.__name__] = arena
"""

HEAD = "import pytest\nfrom fake import Thing\nkept = []\n"


def run_suite(folder: Path, body: str, *options: str, build: str = "checked") -> str:
    (folder / "fake.py").write_text(FAKE)
    (folder / "test_inner.py").write_text(HEAD + body)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests"), str(ROOT / "tests" / "support")]),
        "STATEBACKEND_BUILD": build,
    }
    plugins = ["-p", "fake", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-o", "markers=stress: long", *options, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        check=False,
    )
    return done.stdout + done.stderr


def test_what_is_freed_in_time_passes(tmp_path: Path) -> None:
    body = """
@pytest.fixture
def thing():
    return Thing()

@pytest.fixture(scope="module")
def wide():
    return Thing()

def test_fixture(thing): pass
def test_cycle():
    x = [Thing()]
    x.append(x)
def test_wide(wide): pass
def test_after_wide(): pass
"""
    assert "4 passed" in run_suite(tmp_path, body)


def test_a_leak_is_charged_to_the_test_that_leaked(tmp_path: Path) -> None:
    out = run_suite(tmp_path, "def test_bad():\n    kept.append(Thing())\ndef test_good():\n    Thing()\n")
    assert "left alive by this test: {'things': 1}" in out
    assert "ERROR" in out
    assert "2 passed, 1 error" in out


def test_a_failing_test_is_not_also_called_leaking(tmp_path: Path) -> None:
    out = run_suite(tmp_path, "def test_bad():\n    x = Thing()\n    assert 0\ndef test_good(): pass\n")
    assert "1 failed, 1 passed" in out
    assert "left alive" not in out


def test_a_leak_of_a_wide_fixture_is_found_at_the_end(tmp_path: Path) -> None:
    body = """
@pytest.fixture(scope="module")
def wide():
    kept.append(Thing())

def test_wide(wide): pass
"""
    out = run_suite(tmp_path, body)
    assert "1 passed, 1 error" in out
    assert "nothing_alive_at_the_end" in out


def test_random_numbers_repeat_and_a_failure_says_how(tmp_path: Path) -> None:
    body = "def test_bad(rng, np_rng):\n    assert 0, f'{rng.random()} {np_rng.random()}'\n"
    runs = [run_suite(tmp_path, body, "--seed", seed) for seed in ("1", "1", "2")]
    drawn = [[line for line in run.splitlines() if "AssertionError" in line] for run in runs]
    assert drawn[0] == drawn[1] != drawn[2]
    assert "--seed 1'" in runs[0]


@pytest.mark.parametrize(("options", "summary"), [((), "1 deselected"), (("--stress",), "1 passed")])
def test_long_runs_wait_to_be_asked_for(tmp_path: Path, options: tuple[str, ...], summary: str) -> None:
    assert summary in run_suite(tmp_path, "@pytest.mark.stress\ndef test_long(): pass\n", *options)


MANY_CASES = """
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("c", range(3))
def test_many(a, b, c): print(f"case {a}{b}{c}.")

@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", range(9))
def test_some(d): print(f"some {d}.")

@pytest.mark.sampled(1, of="both")
def test_one(): print("some one.")

@pytest.mark.sampled(1, of="both")
def test_other(): print("some other.")
"""


def cases_of(folder: Path, *options: str) -> tuple[set[str], set[str]]:
    out = run_suite(folder, MANY_CASES, "-s", *options)
    return set(re.findall(r"case (\d+)", out)), set(re.findall(r"some (\w+)", out))


def test_a_run_has_every_pair_of_values_and_samples_of_the_day(tmp_path: Path) -> None:
    days = [cases_of(tmp_path, "--day", day) for day in ("one", "one", "two")]
    assert days[0] == days[1] != days[2]
    for cases, some in days:
        assert len(cases) < 40
        for first, second in ((0, 1), (0, 2), (1, 2)):
            sizes = (5, 4, 3)
            assert len({(case[first], case[second]) for case in cases}) == sizes[first] * sizes[second]
        assert len(some) == 3
    cases, some = cases_of(tmp_path, "--stress")
    assert (len(cases), len(some)) == (60, 11)


def test_the_wrong_build_is_refused(tmp_path: Path) -> None:
    out = run_suite(tmp_path, "def test_x(): pass\n", build="release")
    assert "this run is for the release build, but the checked build is in place" in out
