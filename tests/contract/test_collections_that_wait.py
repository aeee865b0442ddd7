"""Collections wait for some methods, and for these alone."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from statebackend._core.memory import collecting
from statebackend.backends import create_backend
from statebackend.state import ValueStateDescriptor, undisturbed

pytestmark = pytest.mark.checked


def test_collections_go_on_after_methods_of_several_threads() -> None:
    ends = time.monotonic() + 0.5

    @undisturbed
    def method() -> None:
        assert not gc.isenabled()

    def call() -> None:
        while time.monotonic() < ends:
            method()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert gc.isenabled()


def test_collections_wait_for_the_last_of_several_methods() -> None:
    inside, may_leave = threading.Event(), threading.Event()

    @undisturbed
    def long() -> None:
        inside.set()
        may_leave.wait()
        assert not gc.isenabled()

    thread = threading.Thread(target=long)
    thread.start()
    inside.wait()
    undisturbed(lambda: None)()
    assert not gc.isenabled()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "a child has its collections"
    may_leave.set()
    thread.join()
    assert gc.isenabled()


def test_who_has_no_collections_gets_none() -> None:
    gc.disable()
    try:
        undisturbed(lambda: None)()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_lets_collections_go_on() -> None:
    @undisturbed
    def fails() -> None:
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        fails()
    assert gc.isenabled()


def test_one_count_is_for_methods_and_for_the_compiled_core() -> None:
    """With two counts, who comes second would find them off, or let them go on while the first one is inside."""
    keyed = create_backend("heap").create_keyed_backend(int)
    state = keyed.get_value_state(ValueStateDescriptor("v", bytes))
    state.update_many([1], [b"one"])

    @undisturbed
    def method() -> None:
        state.get_many([1])
        assert not gc.isenabled()

    method()
    assert gc.isenabled()
    collecting.stop()
    inside, may_leave = threading.Event(), threading.Event()

    @undisturbed
    def long() -> None:
        inside.set()
        may_leave.wait()

    thread = threading.Thread(target=long)
    thread.start()
    inside.wait()
    collecting.go_on()
    assert not gc.isenabled()
    may_leave.set()
    thread.join()
    assert gc.isenabled()
    keyed.close()
