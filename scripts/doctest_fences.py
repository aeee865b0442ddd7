"""An extension of the site's reference pages: the doctests of a docstring are shown as sessions.

Markdown would take ``>>>`` for a quotation in a quotation. So a run of lines that begins with it, up to the next
empty line, becomes a fenced block.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

SESSION = re.compile(r"^(?P<indent>[ ]*)>>> .*(?:\n(?!\s*$).*)*", re.M)


def fenced(text: str) -> str:
    """The text with its sessions in fences."""
    return SESSION.sub(lambda m: f"{m['indent']}```pycon\n{m[0]}\n{m['indent']}```", text)


class DoctestFences(griffe.Extension):
    """Fences the sessions of every docstring once the package is read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        todo: list[Any] = [pkg]
        while todo:
            each = todo.pop()
            if each.is_alias:
                continue
            if each.docstring is not None:
                each.docstring.value = fenced(each.docstring.value)
            todo.extend(each.members.values())
