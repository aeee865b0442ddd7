"""Descriptors of a changed program: a new name, a function from old to new value, values of new fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from keyed_stores import create, open_store

import statebackend as sb

pytestmark = pytest.mark.usefixtures("no_fsync")

OLD = [
    sb.ValueStateDescriptor("total", int),
    sb.ListStateDescriptor("tags", int).enable_time_to_live(sb.StateTtlConfig("1 day")),
    sb.MapStateDescriptor("seen", str, int),
    sb.ReducingStateDescriptor("sum", "sum", int),
    sb.ValueStateDescriptor("cart", "struct<items:int>"),
    sb.ListStateDescriptor("carts", "struct<items:int>"),
]
NEW = [
    sb.ValueStateDescriptor("total", str, migrate=lambda n: f"n{n}"),
    sb.ListStateDescriptor("labels", str, renamed_from="tags", migrate=str).enable_time_to_live(
        sb.StateTtlConfig("1 day")
    ),
    sb.MapStateDescriptor("doubled", str, int, renamed_from="seen", migrate=lambda n: 2 * n),
    sb.ReducingStateDescriptor("amount", "sum", int, renamed_from="sum"),
    sb.ValueStateDescriptor("cart", "struct<coupon:string,items:bigint>", new_fields={"coupon": "none"}),
    sb.ListStateDescriptor("carts", "struct<items:int,by:string>", new_fields={"by": "ann"}),
]
PLAN = {
    "total": "bigint to string, by migrate=",
    "labels": "renamed from 'tags', bigint to string, by migrate=",
    "doubled": "renamed from 'seen', by migrate=",
    "amount": "renamed from 'sum'",
    "cart": "struct<items:int> to struct<coupon:string,items:bigint>",
    "carts": "struct<items:int> to struct<items:int,by:string>",
}


def values(n: int) -> dict[str, Any]:
    """The values of a key in the new states."""
    carts = [(1, "ann"), (n, "ann")]
    labels = ["1", f"{n}"]
    return {
        "total": f"n{n}",
        "labels": labels,
        "doubled": {"a": 2 * n},
        "amount": n,
        "cart": ("none", n),
        "carts": carts,
    }


def read(state: Any) -> Any:
    kind = state.descriptor.kind
    if kind == "map":
        return dict(state.items())
    return list(state.get()) if kind == "list" else state.value() if kind == "value" else state.get()


def write(keyed: Any, key: int, n: int) -> None:
    total, tags, seen, amount, cart, carts = (keyed.get_state(each) for each in OLD)
    keyed.set_current_key(key)
    total.update(n)
    tags.update([1, n])
    seen.put("a", n)
    amount.clear()
    amount.add(n)
    cart.update((n,))
    carts.update([(1,), (n,)])


@pytest.mark.parametrize("kind", ["heap", "reference", "rocksdb", "native", "savepoint"])
def test_restored_values_are_renamed_and_migrated_once(tmp_path: Path, kind: str) -> None:
    options = {"checkpoints": "native"} if kind == "native" else {}
    backend = sb.create_backend({"native": "rocksdb", "savepoint": "heap"}.get(kind, kind), **options)

    def create(**restore: Any) -> Any:
        return backend.create_keyed_backend(int, max_parallelism=32, **restore)

    with open_store(tmp_path / "store", int) as store:
        with create() as keyed:
            for batch, keys in enumerate(([1, 2], [2])):  # a base, and a change of it
                for key in keys:
                    write(keyed, key, key + batch)
                start: Any = store.commit(batch, [keyed.snapshot(batch, store).result()])
            if kind == "savepoint":
                start = keyed.savepoint(tmp_path / "savepoint")
        planned = sb.tools.plan(store, NEW)
        assert planned.is_safe
        assert {each.action for each in planned.states} == {"migrated"}
        assert {each.name: each.reason for each in planned.states} == PLAN
        for batch in (2, 3):  # the second start keeps what the first one has migrated
            with create(restore=start) as keyed:
                states = {each.name: keyed.get_state(each) for each in NEW}
                assert keyed.undeclared_states() == []
                for key, n in ((1, 1), (2, 3)):
                    keyed.set_current_key(key)
                    assert {name: read(state) for name, state in states.items()} == values(n)
                start = store.commit(batch, [keyed.snapshot(batch, store).result()])
            assert {each.action for each in sb.tools.plan(store, NEW).states} == {"kept"}


def test_old_name_stays_if_the_store_has_both(tmp_path: Path) -> None:
    with open_store(tmp_path, int) as store:
        with create("heap", int) as keyed:
            for name in ("old", "new"):
                keyed.get_state(sb.ValueStateDescriptor(name, int))
            start = store.commit(0, [keyed.snapshot(0, store).result()])
        renamed = sb.ValueStateDescriptor("new", int, renamed_from="old")
        actions = {each.name: each.action for each in sb.tools.plan(store, [renamed]).states}
        assert actions == {"new": "kept", "old": "stored, not declared"}
        with create("heap", int, restore=start) as keyed:
            keyed.get_state(renamed)
            assert keyed.undeclared_states() == ["old"]


@pytest.mark.parametrize("backend", ["heap", "reference", "rocksdb"])
def test_failed_migration_keeps_the_stored_state(tmp_path: Path, backend: str) -> None:
    with open_store(tmp_path, int) as store:
        with create(backend, int) as keyed:
            write(keyed, 1, 7)
            start = store.commit(0, [keyed.snapshot(0, store).result()])
        with create(backend, int, restore=start) as keyed:
            for migrate, error in (
                (lambda n: n / 0, ZeroDivisionError),
                (lambda n: n, sb.SerializationError),
            ):
                with pytest.raises(error):
                    keyed.get_state(sb.ValueStateDescriptor("total", str, migrate=migrate))
            assert "total" in keyed.undeclared_states()
            with pytest.raises(sb.StateMigrationError):  # another kind
                keyed.get_state(sb.ListStateDescriptor("total", str, migrate=str))
            with pytest.raises(sb.UsageError, match="new_fields names a field") as caught:
                keyed.get_state(sb.ValueStateDescriptor("cart", "struct<items:int>", new_fields={"x": 1}))
            assert caught.value.code == "USAGE.DESCRIPTOR"
            keyed.set_current_key(1)
            assert keyed.get_state(OLD[0]).value() == 7


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"renamed_from": "s"}, "USAGE.NAME"),
        ({"renamed_from": 1}, "USAGE.NAME"),
        ({"migrate": "str"}, "USAGE.DESCRIPTOR"),
        ({"new_fields": ["a"]}, "USAGE.DESCRIPTOR"),
        ({"new_fields": {"a": 1}, "migrate": str}, "USAGE.DESCRIPTOR"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(sb.UsageError) as caught:
        sb.ValueStateDescriptor("s", int, **options)
    assert caught.value.code == code
    with pytest.raises(TypeError, match="unexpected keyword"):
        sb.ValueStateDescriptor("s", int, renamed="t")
    with pytest.raises(sb.UsageError, match="operator state does not support renamed_from"):
        sb.OperatorStateBackend().get_list_state(sb.ListStateDescriptor("s", int, renamed_from="t"))
