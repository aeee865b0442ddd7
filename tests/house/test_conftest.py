"""The suite's own safety net: it finds leaks, repeats itself, and refuses the wrong build."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from house_tools import ROOT
from processes import run_command

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
    command = [sys.executable, "-m", "pytest", *plugins, "-o", "markers=stress: long", *options, folder]
    done = run_command(*command, env=environment, cwd=folder, status=None)
    return done.stdout + done.stderr


WITHOUT_FAILURE = """
@pytest.fixture
def thing():
    return Thing()

@pytest.fixture(scope="module")
def wide():
    return Thing()

@pytest.fixture(scope="module")
def leaking():
    kept.append(Thing())

def test_fixture(thing): pass
def test_cycle():
    x = [Thing()]
    x.append(x)
def test_wide(wide): pass
def test_after_wide(): pass
def test_leaking(leaking): pass
"""


def test_a_leak_of_a_wide_fixture_is_found_at_the_end(tmp_path: Path) -> None:
    out = run_suite(tmp_path, WITHOUT_FAILURE)
    assert "5 passed, 1 error" in out
    assert "nothing_alive_at_the_end" in out
    assert "left alive by this test" not in out


WITH_FAILURES = """
def test_leaking(): kept.append(Thing())
def test_good(): Thing()
def test_failing():
    x = Thing()
    assert 0
def test_random(rng, np_rng): assert 0, f"drawn {rng.random()} {np_rng.random()}"

@pytest.mark.stress
def test_long(): print("some long.")

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a suite with failures says: twice with a seed and a day, with others, and with all cases."""
    folder = tmp_path_factory.mktemp("suite")
    once = ("--seed", "1", "--day", "one")
    options = (once, once, ("--seed", "2", "--day", "two"), ("--seed", "1", "--stress"))
    return [run_suite(folder, WITH_FAILURES, "-s", *each) for each in options]


def test_a_leak_is_charged_to_the_test_that_leaked_and_to_no_failing_one(runs: list[str]) -> None:
    for out in runs:
        assert len(re.findall(r"^E .*left alive by this test: \{'things': 1\}", out, re.M)) == 1
        assert "ERROR at teardown of test_leaking" in out
        assert re.search(r"2 failed, \d+ passed, .*1 error", out)


def test_random_numbers_repeat_and_a_failure_says_how(runs: list[str]) -> None:
    drawn = [re.findall(r"^E .*drawn (\S+ \S+)", out, re.M)[0] for out in runs]
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]
    assert "--seed 1'" in runs[0]
    assert "--seed 1 --stress'" in runs[3]


def test_a_run_has_every_pair_of_values_and_samples_of_the_day(runs: list[str]) -> None:
    chosen = [set(re.findall(r"(case \d+|some \w+)", out)) for out in runs]
    assert chosen[0] == chosen[1] != chosen[2]
    for each in chosen[:3]:
        cases = [case.removeprefix("case ") for case in each if case.startswith("case")]
        assert len(cases) < 40
        for first, second in ((0, 1), (0, 2), (1, 2)):
            sizes = (5, 4, 3)
            assert len({(case[first], case[second]) for case in cases}) == sizes[first] * sizes[second]
        assert len(each) == len(cases) + 3
    assert len(chosen[3]) == 60 + 12, "all cases, and the long one"


def test_the_wrong_build_is_refused(tmp_path: Path) -> None:
    out = run_suite(tmp_path, "def test_x(): pass\n", build="release")
    assert "this run is for the release build, but the checked build is in place" in out
