"""What is shipped: the source distribution builds, and the wheel built from it works elsewhere."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from house_tools import ROOT, SOURCES, compiled_modules, module, reads_sources
from processes import run_command

SHIPPED = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "SECURITY.md", "pyproject.toml", "setup.py")


def run(*command: str, cwd: Path, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("STATEBACKEND_", "PYTHON"))}
    return str(run_command(*command, cwd=cwd, env=environment | variables, timeout=None).stdout)


def shipped() -> ModuleType:
    """setup.py, imported: what it says, and nothing built."""
    return module(ROOT / "setup.py", "statebackend_setup")


def requirements(extra: str) -> set[str]:
    """The names of the packages that an extra of setup.py brings."""
    return {re.split(r"[\[<>=!~;]", each)[0].lower() for each in getattr(shipped(), extra)}


@pytest.mark.spark
def test_the_extra_for_tests_brings_what_spark_connect_needs() -> None:
    # pyarrow and numpy come with the library itself.
    wanted = [each for each in importlib.metadata.requires("pyspark") or () if 'extra == "connect"' in each]
    names = {re.split(r"[<>=!~;]", each)[0].lower() for each in wanted} - {"pyarrow", "numpy"}
    assert names
    assert names <= requirements("TEST")


def test_no_test_is_skipped_for_want_of_a_package() -> None:
    """Whatever the tests import belongs into the extra; our own compiled modules are for the build to make."""
    found = {}
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/**/*.py")]:
        names = re.findall(r"importorskip\(\s*[\"']([\w.]+)", path.read_text(encoding="utf-8"))
        found[path.name] = [name for name in names if not name.startswith("statebackend.")]
    assert not any(found.values()), found


def test_long_description_has_absolute_links_only() -> None:
    readme, shown = (ROOT / "README.md").read_text(encoding="utf-8"), shipped().long_description()
    links = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=[\"']([^\"']+)")
    targets, before = ([a or b for a, b in links.findall(text)] for text in (shown, readme))
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    url = shipped().PROJECT_URL
    own = [t.removeprefix(f"{url}/").split("/main/") for t in targets if t.startswith(f"{url}/")]
    assert [path for _, path in own] == [target for target in before if not target.startswith("https://")]
    # Where there is no link, nothing has changed.
    assert links.sub("", shown) == links.sub("", readme)


def test_pages_hold_no_address_that_leads_nowhere() -> None:
    """The project has no public repository yet. Metadata of the package names its future address."""
    pages = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "mkdocs.yml")]
    for page in [*pages, *ROOT.glob("docs/**/*.md")]:
        assert "github.com/statebackend" not in page.read_text(encoding="utf-8"), page.name


def files(*suffixes: str) -> set[str]:
    found = (path for suffix in suffixes for path in SOURCES.glob(f"**/*.{suffix}"))
    return {path.relative_to(SOURCES.parent).as_posix() for path in found}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "setup.py", "-q", "egg_info", "-e", str(folder), "sdist", "-d", str(folder), cwd=ROOT)
    return next(folder.glob("*.tar.gz"))


@reads_sources
@pytest.mark.slow
def test_the_sdist_holds_sources_and_nothing_built(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {*SHIPPED, *files("pyx", "pxd", "py"), "statebackend/py.typed"} - names == set()
    tests = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*") if path.is_file()}
    assert {name for name in tests - names if "/__pycache__/" not in name} == set()
    assert [name for name in names if name.endswith((".so", ".c", ".cpp", ".pyc"))] == []


@reads_sources
@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("STATEBACKEND_BUILD") == "checked", reason="compiles the release build; once is enough"
)
@pytest.mark.stress
def test_the_wheel_from_the_sdist_works_elsewhere(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path)
    source = next(p for p in tmp_path.iterdir() if p.is_dir())
    options = ["--no-build-isolation", "--no-deps", "--disable-pip-version-check", "-q"]
    # What is tested is what the wheel has, not how fast it is: without optimisation it is built in half the time.
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -O0\n', encoding="utf-8")
    compiler.chmod(0o755)
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", *options, "-w", str(tmp_path), str(source), cwd=tmp_path, CC=str(compiler))
    wheel = next(tmp_path.glob("*.whl"))

    names = set(zipfile.ZipFile(wheel).namelist())
    assert "statebackend/py.typed" in names
    assert files("pxd", "py") - names == set()
    assert [n for n in names if n.endswith((".pyx", ".c", ".cpp")) or "core_probe" in n] == []
    assert [n for n in names if not n.startswith(("statebackend/", "statebackend-"))] == []

    target = tmp_path / "installed"
    run(*pip, "install", *options, "--target", str(target), str(wheel), cwd=tmp_path)
    imports = "; ".join(f"import {name}" for name in ("statebackend", *compiled_modules()))
    code = f"import sys; sys.path.insert(0, {str(target)!r}); {imports}; print(statebackend.__file__)"
    assert run(sys.executable, "-I", "-c", code, cwd=tmp_path).strip().startswith(str(target))
