"""Backends by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import statebackend as sb
from statebackend import backends

REFERENCE = "statebackend.backends.reference:ReferenceBackend"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_registered", {})


def test_the_reference_backend_is_always_there() -> None:
    assert sb.available_backends()["reference"] == ("reference", True, None, None)
    assert isinstance(sb.create_backend("reference"), sb.StateBackend)


def test_an_unknown_name_says_which_are_known() -> None:
    with pytest.raises(sb.BackendUnavailableError, match=r"'heapp'.*'heap'.*'reference'"):
        sb.create_backend("heapp")


def test_an_unknown_option_says_which_there_are() -> None:
    with pytest.raises(sb.UsageError, match=r"'reference' lacks the option 'max_bytes'"):
        sb.create_backend("reference", max_bytes=1)


def test_registering() -> None:
    sb.register_backend("mine", REFERENCE)
    sb.register_backend("mine", REFERENCE)
    assert type(sb.create_backend("mine")) is type(sb.create_backend("reference"))
    assert sb.available_backends()["mine"].is_available
    with pytest.raises(sb.UsageError, match="'mine' is taken"):
        sb.register_backend("mine", "other:Backend")
    with pytest.raises(sb.UsageError, match="'heap' is taken"):
        sb.register_backend("heap", REFERENCE)


@pytest.mark.parametrize("target", ["module", "module:", ":Class", "a b:C", 5, None])
def test_a_bad_target_is_refused(target: str) -> None:
    with pytest.raises(sb.UsageError, match="my_package.backend:MyBackend"):
        sb.register_backend("mine", target)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module_here:Backend", "no_such_module_here"),
        ("statebackend.backends.reference:NoSuchClass", "NoSuchClass"),
        ("statebackend.state.clocks:SystemClock", "not a StateBackend"),
    ],
)
def test_backend_that_cannot_be_loaded_says_why(target: str, reason: str) -> None:
    sb.register_backend("broken", target)
    found = sb.available_backends()["broken"]
    assert not found.is_available
    assert reason in str(found.reason)
    with pytest.raises(sb.BackendUnavailableError, match=reason):
        sb.create_backend("broken")


def test_a_backend_may_say_why_it_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_backend.py").write_text(
        "from statebackend.backends.reference import ReferenceBackend\n"
        "class NeedyBackend(ReferenceBackend):\n"
        "    @classmethod\n"
        "    def unavailable_reason(cls):\n"
        "        return 'it needs a library'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sb.register_backend("needy", "needy_backend:NeedyBackend")
    assert "needy_backend" not in sys.modules
    assert sb.available_backends()["needy"] == ("needy", False, "it needs a library", None)
    with pytest.raises(sb.BackendUnavailableError, match="it needs a library"):
        sb.create_backend("needy")
