"""Every example runs: the Python blocks of the README and of docs/, and the doctests of every module.

The blocks of a page run in file order in one namespace and in an empty folder, like a reader who follows
the page. A ``pycon`` block is a session: what it prints must be what the page shows.

A comment of HTML before a block keeps it from running here: ``<!-- not run: <reason> -->`` if it cannot run, and
``<!-- with Spark: <where> -->`` if a test with a Spark session runs it. Readers of the page do not see either.
"""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from house_tools import ROOT, compiled_modules, python_modules

from statebackend import backends

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ \t]*$", re.M | re.S)
#: The comment that keeps the block after it from running here.
NOTE = re.compile(r"<!-- (?P<kind>not run|with Spark): \S[^>]{9,}-->\s*\Z")


class Block(NamedTuple):
    line: int
    is_session: bool
    note: str | None  # "not run", "with Spark", or nothing: it runs here
    code: str


def python_blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language = match["info"].strip()
        assert " " not in language, f"```{language}: the site knows no options of a fence"
        if language.lower() in ("python", "py", "python3", "pycon"):
            before = text[: match.start()]
            note = NOTE.search(before)
            assert note or not before.rstrip().endswith("-->"), (
                f"a comment without a reason: {before[-60:]!r}"
            )
            indent = len(match["indent"])
            code = "".join(line[indent:] for line in match["body"].splitlines(keepends=True))
            line = text.count("\n", 0, match.start("body")) + 1
            found.append(Block(line, language.lower() == "pycon", note and note["kind"], code))
    return found


def run_page(text: str, name: str) -> int:
    """Runs the page's blocks and answers how many ran."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    try:
        for block in python_blocks(text):
            if block.note:
                continue
            if block.is_session:
                run_session(block, name, namespace)
            else:
                # Blank lines in front keep the line numbers of the page in tracebacks.
                exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
            ran += 1
    finally:
        namespace.clear()  # a class of the page that is cached somewhere would keep all of it alive
    return ran


def run_session(block: Block, name: str, namespace: dict[str, object]) -> None:
    session = doctest.DocTestParser().get_doctest(block.code, {}, name, name, block.line - 1)
    assert session.examples, f"{name}:{block.line}: a pycon block without a prompt"
    session.globs = namespace
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(session, out=report.append, clear_globs=False)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends, "_registered", {})  # what a page registers is gone after it
    run_page(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())


def links(page: Path) -> list[str]:
    """The targets of a page's links to other files and to anchors."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", t)]


def dead_links(page: Path) -> list[str]:
    targets = links(page)
    dead = [t for t in targets if not (page.parent / t.partition("#")[0]).exists()]
    anchors = [(t, *t.partition("#")[::2]) for t in targets if "#" in t and t not in dead]
    return dead + [
        t for t, path, anchor in anchors if anchor not in headings(page.parent / path if path else page)
    ]


def test_links_lead_somewhere() -> None:
    assert {page.name: dead for page in PAGES if (dead := dead_links(page))} == {}


def test_each_page_is_in_the_navigation_and_within_two_clicks() -> None:
    """The clicks begin at the README; on the site, a page is in a tab, and the first page of a tab has the others."""
    pages = {page for page in PAGES if page.parent != ROOT}
    nav = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(nav) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages)
    first = {(ROOT / target.partition("#")[0]).resolve() for target in links(ROOT / "README.md")} & pages
    second = {(page.parent / target.partition("#")[0]).resolve() for page in first for target in links(page)}
    assert pages - first - second == set()


def test_readme_shows_figures_of_the_benchmark() -> None:
    """The README repeats figures of the page on Spark, rounded to thousands."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/performance/spark.md").read_text(encoding="utf-8")
    table = readme[readme.index("| rows a second |") : readme.index("Compare figures")]
    shown = [int(n.replace(",", "")) // 1000 for n in re.findall(r"\| ([\d,]+)(?= \|)", table)]
    measured = [round(float(n.replace(",", "")) / 1000) for n in re.findall(r"\| ([\d,]{5,})(?= \|)", page)]
    measured += [int(n.replace(",", "")) for n in re.findall(r"([\d,]+)k(?= \|)", page)]
    assert len(shown) == 7
    assert [n for n in shown if n not in measured] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them, and those that it names itself."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[-\s]+", "-", title) for title in plain} | set(re.findall(r'<a id="([^"]+)">', text))


def folders() -> dict[str, list[str]]:
    """The modules of each folder of the package."""
    modules: dict[str, list[str]] = {}
    for name in sorted({*python_modules(), *compiled_modules()}):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules


@pytest.mark.parametrize("folder", folders())
def test_doctests(folder: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for name in folders()[folder]:
        seen: set[str | None] = set()
        for test in doctest.DocTestFinder().find(importlib.import_module(name)):
            if test.docstring not in seen:  # Cython lists each docstring a second time, in __test__
                runner.run(test)
            seen.add(test.docstring)
    assert runner.failures == 0
