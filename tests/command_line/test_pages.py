"""The commands that pages show run, in file order, and print what the page shows."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import pytest
from house_tools import ROOT
from shells import in_pipe

from statebackend.command_line.parser import make_parser

pytestmark = pytest.mark.usefixtures("no_fsync")

SESSION = re.compile(r"^```console\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("page", ["command-line.md", "bad-deploy.md"])
def test_page_shows_what_commands_print(page: str, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    ran = 0
    for session in SESSION.findall((ROOT / "docs/operate" / page).read_text(encoding="utf-8")):
        for typed, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.M):
            program, *arguments = shlex.split(typed)
            assert program == "statebackend"
            status, out, err = in_pipe(*arguments)
            assert status == 0, f"{typed}\n{err}"
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(expected, out, options), f"{typed}\n{out}"
            ran += 1
    assert ran > 2


def test_page_lists_every_command() -> None:
    page = (ROOT / "docs/operate/command-line.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+) (?:MODULE:NAME )?STORE", page, re.M)
    assert sorted(listed) == sorted(make_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
