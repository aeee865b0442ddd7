"""What a long tool shows: on a terminal a line that goes away, elsewhere nothing."""

from __future__ import annotations

import io

import pytest

from statebackend.tools import progress_line as module
from statebackend.tools.progress_line import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; set its first element."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_the_share_and_is_left_clean(seconds: list[float]) -> None:
    stream = Terminal()
    with Progress("rescaling", 200, stream=stream) as progress:
        progress.advance(10)
        assert stream.getvalue() == ""  # what is quick shows nothing
        seconds[0] += 1
        progress.advance(40)
        progress.advance(40)
        assert stream.getvalue() == "\rrescaling: 25 %"
        seconds[0] += 1
        progress.advance(500)
        assert stream.getvalue().endswith("\rrescaling: 100 %")
    last = stream.getvalue().rpartition("100 %")[2]
    assert last == "\r" + " " * 17 + "\r"


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_nothing_is_shown_elsewhere(
    seconds: list[float], stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)  # None in programs without a console
    with Progress("rescaling", 0, stream=stream) as progress:
        seconds[0] += 10
        progress.advance(1)
    assert stream is None or stream.getvalue() == ""
