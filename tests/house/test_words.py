"""The check of words finds each pattern, and the pages keep its limit."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from house_tools import ROOT, module, reads_sources

SAMPLES = {
    "a noun instead of 'what'": "A copy of what is left.",
    "a sentence that opens with a question word": "It reads. Which files it reads, is said below.",
    "the noun instead of 'that of'": "The time is that of the batch.",
    "an agent instead of 'nobody'": "Nothing that nobody reads.",
    "'use', 'follow' instead of 'go by'": "State goes by the clock.",
    "'again' instead of 'anew'": "The batch runs anew.",
    "'always' instead of 'for ever'": "It stays for ever.",
    "'next to', 'compared with' instead of 'beside'": "A file beside the log.",
    "'also' instead of ', too'": "Timers are columns, too.",
    "a positive form of 'is no X'": "There is no file.",
    "'own' without 'of its'": "A thread of its own.",
    "'belongs in'": "It belongs into state.",
    "'emit', 'undo' instead of 'give out', 'take back'": "The function gives out rows.",
    "'is' instead of 'stands', 'lies'": "The file lies in a folder.",
    "'except' instead of 'but for'": "All files but for one.",
    "'garbage collection' instead of 'collection'": "A collection of garbage.",
}


@pytest.fixture(scope="module")
def words() -> ModuleType:
    return module(ROOT / "scripts" / "words.py", "words")


def test_each_pattern_has_a_sample(words: ModuleType) -> None:
    assert words.PATTERNS.keys() == SAMPLES.keys()


@pytest.mark.parametrize("name", SAMPLES)
def test_pattern_is_found_in_pages_and_docstrings(words: ModuleType, tmp_path: Path, name: str) -> None:
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text(SAMPLES[name])
    source.write_text(f'"""{SAMPLES[name]}"""\n')
    for path in (page, source):
        assert name in [found for found, _ in words.marks(words.prose(path))]


def test_code_and_exceptions_are_not_read(words: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Use `a beside b`, or take back a batch.\n\n```python\n# anew\n```\n")
    assert list(words.marks(words.prose(page))) == []


@reads_sources
def test_pages_and_code_keep_the_limit(words: ModuleType) -> None:
    assert words.main([]) == 0
