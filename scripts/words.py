#!/usr/bin/env python3
"""Find phrases that readers stumble over, in pages, docstrings, comments and messages: ``words.py [--all] [PATH ...]``.

It fails if pages or code have more than LIMIT of them in 10,000 words. ``--all`` shows each one.
``--sample=N`` prints N random sentences of the pages instead, for a reader to judge. ``--seed=S`` chooses them.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIMIT = 8
ROOT = Path(__file__).resolve().parents[1]
PATTERNS = {
    "a noun instead of 'what'": r"(?:(?:^|[.:;,(] )|\b(?:of|by|for|to|from|with|than|in|and|or|but|so|as|that) )"
    r"(?:[Ww]hat|[Ww]hoever|[Ww]hatever) (?!about\b|for\b)\w+",
    "a sentence that opens with a question word": r"(?:^|[.] )(?:Which|How many|How much|Whose)\b(?![^.]*\?)",
    "the noun instead of 'that of'": r"\b(?:that|those) of\b",
    "an agent instead of 'nobody'": r"\b(?:nobody|somebody|no one|none but)\b",
    "'use', 'follow' instead of 'go by'": r"\b(?:go|goes|going|went) by\b(?! itself| themselves)",
    "'again' instead of 'anew'": r"\banew\b",
    "'always' instead of 'for ever'": r"\bfor ever\b",
    "'next to', 'compared with' instead of 'beside'": r"\bbeside\b(?! itself)",
    "'also' instead of ', too'": r", too\b",
    "a positive form of 'is no X'": r"\b(?:is|are|was|has) no (?!longer|more\b)\w+",
    "'own' without 'of its'": r"\bof (?:its|their|his|your|our) own\b|\bof yours\b",
    "'belongs in'": r"\bbelongs? into\b",
    "'emit', 'undo' instead of 'give out', 'take back'": r"\b(?:gives?|given|gave) out\b|\btak(?:es?|en|ing) back\b",
    "'is' instead of 'stands', 'lies'": r"\b(?:stands?|lies?) (?:in|on|at|beside|there|for)\b",
    "'except' instead of 'but for'": r"\bbut for\b",
    "'garbage collection' instead of 'collection'": r"\bcollections? (?:of|by) (?:Python|garbage)\b",
}
COMPILED = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
#: Phrases that are right: a name of the API, and words of a quoted system.
EXCEPTIONS = ("take back", "takes back", "taken back")


def prose(path: Path) -> str:
    """The words that a person reads: no code blocks, and of sources only docstrings, comments and messages."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        text = re.sub(r"(?ms)^(```|~~~).*?^\1", "", text)
        text = re.sub(r"(?m)^    .*$", "", text)
    else:
        parts = re.findall(r'(?s)"""(?:.*?)"""|"[^"\n]* [^"\n]*"|#[^\n]*', text)
        text = re.sub(r"(?m)^\s*(>>>|\.\.\.).*$", "", "\n\n".join(parts))
    text = re.sub(r"``?[^`\n]*``?", "CODE", text)
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def marks(text: str) -> Iterator[tuple[str, str]]:
    for name, pattern in COMPILED.items():
        for found in pattern.finditer(text):
            if found[0].strip() not in EXCEPTIONS:
                yield name, text[max(0, found.start() - 40) : found.end() + 30].replace("\n", " ")


def sentences(path: Path) -> Iterator[str]:
    """The sentences of a page, and the cells of its tables, each with its place."""
    place = ""
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1 *$|<!--.*?-->", "", path.read_text(encoding="utf-8"))
    for heading, block in re.findall(r"(?:^#+ (.*)\n)|((?:^(?!#).*\S.*\n?)+)", text, re.M):
        if heading:
            place = f"{path.relative_to(ROOT)}: {heading}"
        parts = re.split(r"^ *(?:[*-]|\d+[.]) |[|]", re.sub(r"\n +(?![*\d -])", " ", block), flags=re.M)
        for part in parts:
            for each in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\[])", " ".join(part.split())):
                if len(each.split()) > 3:
                    yield f"{place}: {each}"


def main(arguments: list[str]) -> int:
    options = dict(a[2:].partition("=")[::2] for a in arguments if a.startswith("--"))
    roots = [Path(a) for a in arguments if not a.startswith("--")] or [
        ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "docs", "statebackend")
    ]
    files = [f for root in roots for f in ([root] if root.is_file() else sorted(root.rglob("*.*")))]
    if "sample" in options:
        told = [each for path in files if path.suffix == ".md" for each in sentences(path)]
        print(*random.Random(options.get("seed", "")).sample(told, int(options["sample"])), sep="\n")
        return 0
    words, found = Counter[str](), Counter[str]()
    for path in files:
        if path.suffix in (".md", ".py", ".pyx", ".pxd"):
            kind, text = ("pages" if path.suffix == ".md" else "code"), prose(path)
            words[kind] += len(text.split())
            for name, place in marks(text):
                found[kind] += 1
                if "all" in options:
                    print(
                        f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}: {name}: ...{place}..."
                    )
    rates = {kind: 10_000 * found[kind] / words[kind] for kind in words}
    for kind, rate in rates.items():
        print(
            f"words: {kind} {words[kind]:,}, phrases to reword {found[kind]}, in 10,000 words {rate:.1f} of {LIMIT}"
        )
    print(f"words: exceptions: {', '.join(EXCEPTIONS)}")
    return any(rate > LIMIT for rate in rates.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
