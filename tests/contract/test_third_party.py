"""A backend of another package, found through its entry point, passes the contract suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from house_tools import ROOT
from processes import run_command

PACKAGE = '''
"""A backend of a package of its own, which leaves all to the reference."""

from statebackend.state import StateBackend
from statebackend.backends.reference import ReferenceKeyedBackend
from statebackend.operator_state import OperatorStateBackend


class ThrowAwayBackend(StateBackend):
    name = "throw-away"

    def __init__(self, *, label="none"):
        self.label = label

    def create_keyed_backend(self, key_type, **options):
        options = {name: value for name, value in options.items() if value is not None}
        return ReferenceKeyedBackend(key_type, **options)

    def create_operator_backend(self, **options):
        return OperatorStateBackend(**options)
'''


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the installed package, as pip would leave it."""
    (tmp_path / "throw_away.py").write_text(PACKAGE)
    info = tmp_path / "throw_away-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: throw-away\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[statebackend.backends]\nthrow-away = throw_away:ThrowAwayBackend\n"
        "reference = throw_away:ThrowAwayBackend\n"
    )
    return tmp_path


def run(package: Path, *command: str) -> str:
    # Another build's folder may be in front of the sources.
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "STATEBACKEND_CONTRACT_BACKENDS": "throw-away"}
    return str(run_command(sys.executable, *command, cwd=ROOT, env=environment).stdout)


def test_it_is_found_by_its_entry_point(package: Path) -> None:
    code = (
        "from statebackend.backends import available_backends, create_backend\n"
        "print(available_backends()['throw-away'])\n"
        "print(create_backend('throw-away', label='x').label)\n"
        "print(create_backend('reference'))\n"
    )
    available, label, reference = run(package, "-c", code).splitlines()
    assert "is_available=True" in available
    assert label == "x"
    assert reference == "ReferenceBackend()"  # what is built in is not replaced


@pytest.mark.slow
def test_it_passes_the_contract_suite(package: Path, is_stress: bool) -> None:
    modules = ["value_state", "marks", "flink_programs"]
    if is_stress:
        modules += ["map_state", "enumeration", "backend_rules"]
    suite = [f"tests/contract/test_{name}.py" for name in modules]
    out = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *suite)
    assert " passed" in out
    assert "failed" not in out
