"""Errors say what, where and what to do, and survive pickling."""

from __future__ import annotations

import errno
import inspect
import pickle

import pytest

from statebackend import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_all_names_every_error_of_the_module() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and name[0] != "_"}
    assert {name for name in defined if issubclass(getattr(errors, name), Exception)} == set(errors.__all__)


def test_the_text_has_what_where_hint_and_code() -> None:
    error = errors.KeyGroupError("outside", detail="key group 7", hint="restart")
    assert str(error) == "outside (key group 7). Hint: restart [KEY_GROUP]"
    assert str(errors.ClosedError("closed")) == "closed [CLOSED]"
    assert str(errors.UsageError("no", code="USAGE.SPECIAL")) == "no [USAGE.SPECIAL]"


def test_outer_layers_put_their_place_in_front() -> None:
    error = errors.SerializationError("bad").at("field 'a'").at("position 3")
    assert error.detail == "position 3, field 'a'"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_has_its_own_code_and_pickles(cls: type[errors.StateBackendError]) -> None:
    assert issubclass(cls, errors.StateBackendError)
    assert cls("x").code == cls.default_code
    assert [other for other in CLASSES if other.default_code == cls.default_code] == [cls]
    error = cls("what", code="A.B", detail="where", hint="do")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is cls
        assert (copy.args, vars(copy)) == (error.args, vars(error))


class Demanding(errors.UsageError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}", hint="count")
        self.two = two


def test_an_error_with_another_constructor_pickles() -> None:
    copy = pickle.loads(pickle.dumps(Demanding(1, 2)))
    assert (str(copy), copy.two) == ("1 and 2. Hint: count [USAGE]", 2)


def test_a_store_error_keeps_the_number_of_its_cause_when_it_is_pickled() -> None:
    error = errors.StoreError.of(OSError(errno.ENOSPC, "the disk is full"), "writing")
    assert pickle.loads(pickle.dumps(error)).errno == errno.ENOSPC


def test_serialization_errors_are_what_python_users_catch() -> None:
    with pytest.raises(ValueError, match="bad"):
        raise errors.SerializationError("bad")
    with pytest.raises(TypeError, match="bad"):
        raise errors.SerializationTypeError("bad")
