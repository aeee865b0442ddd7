"""An interpreter that used the package ends silently, with status 0."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house_tools import compiled_modules

HEAVY = ("pyspark", "py4j", "pandas", "hypothesis", "pytest")


def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def assert_silent(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("options", [(), ("-X", "dev"), ("-W", "error"), ("-O",), ("-B", "-s")])
def test_importing_everything_compiled_is_silent(options: tuple[str, ...]) -> None:
    imports = "\n".join(f"import {name}" for name in ("statebackend", *compiled_modules()))
    assert_silent(run(imports, *options))


def test_importing_each_compiled_module_first_is_silent() -> None:
    for name in compiled_modules():
        assert_silent(run(f"import {name}"))


def test_objects_that_outlive_their_module_are_silent() -> None:
    """At exit modules are cleared in no order that one could rely on; types kept in sys outlive theirs."""
    code = "import sys, importlib\nsys.kept = []\n"
    for name in compiled_modules():
        code += f"m = importlib.import_module({name!r}); sys.kept.append(dict(vars(m)))\n"
    assert_silent(run(code))


def test_the_package_imports_nothing_heavy() -> None:
    assert_silent(run(f"import sys, statebackend\nassert not set({HEAVY!r}) & set(sys.modules)"))


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
    assert_silent(run(code))
