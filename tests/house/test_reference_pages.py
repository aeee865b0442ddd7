"""What the pages say about names, signatures and error codes is what the package has.

A table whose first header cell is a name in backticks (``sb``, ``sb.MapState``) lists members of it: the
first cell of each row is a call, ``get(key, default=None)``, an attribute, or for an operator its use,
``state[key]``. Parameters must be those of the member; a class listed in this way must be listed whole.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from house_tools import ROOT, SOURCES, python_modules, reads_sources
from pyspark.sql.streaming import stateful_processor
from pyspark.sql.streaming.state import GroupState

import statebackend as sb
from statebackend.errors import StateBackendError
from statebackend.state.timers import Timers

#: Pages that people have written; those in docs/reference are made of docstrings.
PAGES = sorted(set(ROOT.glob("docs/**/*.md")) - set(ROOT.glob("docs/reference/*.md")))
OPERATORS = {
    "state[key]": "__getitem__",
    "state[key] = value": "__setitem__",
    "del state[key]": "__delitem__",
    "key in state": "__contains__",
    "for element in state": "__iter__",
    "for key in state": "__iter__",
}
#: Classes that need no table of members: they are listed as constructors, or the reference lists them from docstrings.
WITHOUT_TABLE = {
    *(name for name in sb.__all__ if name.endswith(("Descriptor", "Error"))),
    *("BroadcastState", "Checkpoint", "CheckpointStore", "KeyedStateBackend", "OperatorStateBackend"),
    *("ReadOnlyBroadcastState", "StateSnapshot"),
    "StateTtlConfig",
    "TimeWindow",
    "KeyGroupRange",
    "Changed",
}


class Row(NamedTuple):
    page: str
    owner: str
    cell: str


def tables(text: str) -> Iterator[list[list[str]]]:
    """The cells of each table, header first, the line of dashes left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        yield [lines[0], *lines[2:]]


@functools.cache
def member_rows() -> list[Row]:
    rows = []
    for page in PAGES:
        for header, *lines in tables(page.read_text(encoding="utf-8")):
            owner = re.fullmatch(r"`(sb(?:\.\w+)*|statebackend(?:\.\w+)+)`", header[0])
            if owner:
                name = page.relative_to(ROOT).as_posix()
                for line in lines:
                    rows += [Row(name, owner[1], cell) for cell in re.findall(r"`([^`]+)`", line[0])]
    return rows


def found(dotted: str) -> Any:
    first, *rest = dotted.split(".")
    thing: Any = sb if first == "sb" else importlib.import_module(first)
    for part in rest:
        thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(dotted)
    return thing


def member_name(cell: str) -> str:
    return OPERATORS.get(cell) or re.match(r"\w+", cell)[0]  # type: ignore[index]


def said(call: str) -> list[tuple[str, str]]:
    """Names and defaults of the parameters in ``name(a, *, b=1)``, with the marks that are parameters too."""
    arguments = ast.parse(f"def {call}: ...").body[0].args  # type: ignore[attr-defined]
    return described(arguments)


def described(a: ast.arguments) -> list[tuple[str, str]]:
    plain = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(plain) - len(a.defaults)) + list(a.defaults)
    listed = [(p.arg, "" if d is None else ast.unparse(d)) for p, d in zip(plain, defaults, strict=True)]
    if a.vararg:
        listed.append((f"*{a.vararg.arg}", ""))
    for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        listed.append((f"{p.arg} by name", "" if d is None else ast.unparse(d)))
    if a.kwarg:
        listed.append((f"**{a.kwarg.arg}", ""))
    return listed


def real(member: Any, is_method: bool) -> list[tuple[str, str]]:
    listed = []
    for p in list(inspect.signature(member).parameters.values())[is_method:]:
        default = "" if p.default is p.empty else repr(p.default)
        if p.default is sb.VOID:
            default = "sb.VOID"
        name = {p.VAR_POSITIONAL: f"*{p.name}", p.VAR_KEYWORD: f"**{p.name}"}.get(p.kind, p.name)
        listed.append((f"{name} by name" if p.kind is p.KEYWORD_ONLY else name, default))
    return listed


def mistake(row: Row) -> str:
    """What a row of a table of members says wrongly, or nothing."""
    owner, name = found(row.owner), member_name(row.cell)
    if row.cell in OPERATORS:
        return "" if hasattr(owner, name) else "is not there"
    if isinstance(owner, type) and not hasattr(owner, name):
        source = inspect.getsource(owner)
        return "" if re.search(rf"self\.{name}\b[^=\n]* = |^    {name}: ", source, re.M) else "is not there"
    static = inspect.getattr_static(owner, name)
    is_method = isinstance(owner, type) and not isinstance(static, (staticmethod, classmethod))
    if "(" not in row.cell:
        return "is a method: show its parameters" if callable(static) else ""
    parameters = real(getattr(owner, name), is_method)
    return "" if said(row.cell) == parameters else f"has the parameters {parameters}"


def test_calls_in_tables_exist_with_these_parameters() -> None:
    assert {
        f"{row.page}: {row.owner}.{row.cell}": wrong for row in member_rows() if (wrong := mistake(row))
    } == {}


def public_members(owner: type) -> set[str]:
    names = {name for name in dir(owner) if not name.startswith("_")}
    return names | {name for name in OPERATORS.values() if hasattr(owner, name)}


def classes_with_members() -> list[str]:
    named = {row.owner for row in member_rows()}
    wanted = {f"sb.{name}" for name in sb.__all__ if isinstance(getattr(sb, name), type)}
    wanted |= {name for name in named if isinstance(found(name), type)}
    return sorted(wanted - {f"sb.{name}" for name in WITHOUT_TABLE})


def test_every_public_member_of_a_class_is_listed() -> None:
    rows = member_rows()
    missing = set()
    for owner in classes_with_members():
        listed = {member_name(row.cell) for row in rows if row.owner == owner}
        unlisted = public_members(found(owner)) - listed
        missing |= {f"{owner}.{name}" for name in unlisted}
    assert missing == set()


def test_every_public_name_is_in_the_pages() -> None:
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text(encoding="utf-8"))}
    assert set(sb.__all__) - words == set()


def test_the_reference_has_every_public_name_once() -> None:
    named = [
        name
        for page in ROOT.glob("docs/reference/*.md")
        for name in re.findall(r"^::: statebackend\.(\S+)$", page.read_text(encoding="utf-8"), re.M)
    ]
    # `sb.spark.stateful` is a function that hides the module of its name, which only the site can tell apart.
    named = [name.replace("spark.stateful.stateful", "spark.stateful") for name in named]
    assert len(named) == len(set(named))
    for name in named:
        found(f"sb.{name}")
    # Modules have their names listed instead, and the two namespaces are constants, said in the prose.
    listed = {name.partition(".")[0] for name in named}
    assert set(sb.__all__) - listed - {"__version__", "errors", "VOID", "ALL_NAMESPACES"} == set()
    for module in ("spark", "spark.sinks", "testing", "tools"):
        there = found(f"sb.{module}")
        own = [name for name in there.__all__ if getattr(sb, name, None) is not getattr(there, name)]
        wanted = {f"{module}.{name}" for name in own if not inspect.ismodule(getattr(there, name))}
        assert wanted - set(named) == set()


def has_example(name: str) -> bool:
    cls = getattr(sb, name)
    texts = [cls.__doc__ or "", *(getattr(m, "__doc__", "") or "" for m in vars(cls).values())]
    module = inspect.getmodule(cls).__doc__ or ""  # type: ignore[union-attr]
    return bool(cls.__doc__) and (">>>" in "".join(texts) or (">>>" in module and name in module))


def test_every_public_class_has_a_docstring_with_an_example() -> None:
    assert [n for n in sb.__all__ if inspect.isclass(getattr(sb, n)) and not has_example(n)] == []


# --- error codes


@functools.cache
def codes_in_package() -> set[str]:
    """Every ``code`` that the package gives an error, and every default code of an error class."""
    for module in python_modules():  # classes of modules that are not imported yet count too
        if not module.startswith("statebackend.spark"):
            importlib.import_module(module)
    found_codes: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                found_codes |= {
                    c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant) and c.value
                }
    for path in SOURCES.rglob("*.p[yx][xd]"):
        found_codes |= set(re.findall(r'\bcode="([^"]+)"', path.read_text(encoding="utf-8")))
    return found_codes | {cls.default_code for cls in error_classes()}


def error_classes() -> list[type[StateBackendError]]:
    classes, todo = [], [StateBackendError]
    while todo:
        cls = todo.pop()
        classes.append(cls)
        todo += cls.__subclasses__()
    return [cls for cls in classes if cls.__module__.partition(".")[0] == "statebackend"]


def listed_codes() -> list[str]:
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    cells = [line[0] for header, *lines in tables(page) if header[0] == "code" for line in lines]
    codes = [cell.split("`")[1] for cell in cells]
    anchored = [f'<a id="{code.lower().replace(".", "-")}"></a>`{code}`' for code in codes]
    assert cells == anchored, "each code has its anchor"
    return codes


@reads_sources
def test_every_code_is_in_the_catalogue_once() -> None:
    listed = listed_codes()
    assert sorted(codes_in_package() - set(listed)) == [], "add them to docs/errors.md"
    assert sorted(set(listed) - codes_in_package()) == [], "no longer raised: remove them from docs/errors.md"
    assert len(listed) == len(set(listed))


def test_code_begins_with_the_code_of_its_class() -> None:
    # Errors of a stream of changes reach a person through Spark, so their class does not matter.
    defaults = {"CHANGES", *(cls.default_code for cls in error_classes())}
    assert {code for code in codes_in_package() if code.partition(".")[0] not in defaults} == set()
    assert all(re.fullmatch(r"[A-Z_]+(\.[A-Z_0-9]+)?", code) for code in codes_in_package())


@reads_sources
def test_codes_in_prose_are_real() -> None:
    mentioned = {
        code
        for page in PAGES
        for code in re.findall(r"`([A-Z_]+\.[A-Z_0-9]+)`", page.read_text(encoding="utf-8"))
    }
    assert mentioned - codes_in_package() == set()


def test_the_tables_are_read() -> None:
    assert len(member_rows()) > 100
    assert said("f(a, *, b=1, **c)") == [("a", ""), ("b by name", "1"), ("**c", "")]


@reads_sources
def test_the_codes_are_read() -> None:
    assert "SERIALIZATION.NULL" in codes_in_package()
    assert "USAGE.OVERLAPPING_CALL" in codes_in_package()


BUILDER = type(sb.StateTtlConfig.new_builder("1 hour"))
#: Public names of the classes of the package apache-flink 2.3.0, and the classes here.
PYFLINK: list[tuple[type, str]] = [
    (sb.ValueState, "clear update value"),
    (sb.ListState, "add add_all clear get update"),
    (sb.MapState, "clear contains get is_empty items keys put put_all remove values"),
    (sb.ReducingState, "add clear get"),
    (sb.AggregatingState, "add clear get"),
    (sb.BroadcastState, "clear contains get is_empty items keys put put_all remove values"),
    (sb.ReducingStateDescriptor, "enable_time_to_live get_name get_reduce_function"),
    (sb.AggregatingStateDescriptor, "enable_time_to_live get_name get_agg_function"),
    (sb.StateTtlConfig, "get_cleanup_strategies get_state_visibility get_ttl get_ttl_time_characteristic"),
    (sb.StateTtlConfig, "get_update_type is_enabled new_builder"),
    (BUILDER, "build cleanup_full_snapshot cleanup_in_rocksdb_compact_filter cleanup_incrementally"),
    (BUILDER, "disable_cleanup_in_background never_return_expired return_expired_if_not_cleaned_up"),
    (BUILDER, "set_state_visibility set_ttl set_ttl_time_characteristic set_update_type"),
    (BUILDER, "update_ttl_on_create_and_write update_ttl_on_read_and_write use_processing_time"),
    (sb.FunctionContext, "get_aggregating_state get_broadcast_state get_list_state get_map_state"),
    (sb.FunctionContext, "get_current_key get_reducing_state get_state time_domain timer_service timestamp"),
    (sb.KeyedProcessFunction, "close on_timer open process_broadcast_element process_element"),
    (sb.AggregateFunction, "add create_accumulator get_result merge"),
    (Timers, "current_processing_time current_watermark delete_event_time_timer"),
    (Timers, "delete_processing_time_timer register_event_time_timer register_processing_time_timer"),
]
OWNERS = {
    "ctx": sb.FunctionContext,
    "config": sb.StateTtlConfig("1 hour"),
    "descriptor": sb.AggregatingStateDescriptor("n", "avg", int),
    "function": sb.KeyedProcessFunction,
}


def test_page_names_what_differs_from_pyflink() -> None:
    page = (ROOT / "docs/start/from-flink.md").read_text(encoding="utf-8")
    (rows,) = [lines[1:] for lines in tables(page) if lines[0] == ["PyFlink", "here", "difference"]]
    listed = {re.search(r"(\w+)\(", theirs)[1] for theirs, _, _ in rows}  # type: ignore[index]
    assert {name for ours, names in PYFLINK for name in names.split() if not hasattr(ours, name)} == listed
    for _, ours, _ in rows:
        owner, name = re.match(r"`(\w+)\.(\w+)", ours).groups()  # type: ignore[union-attr]
        assert hasattr(OWNERS[owner], name) or name in ("reduction", "process_broadcast"), ours


def test_page_names_all_of_sparks_functions_with_state() -> None:
    page = (ROOT / "docs/start/from-spark.md").read_text(encoding="utf-8")
    theirs: list[Any] = [stateful_processor.StatefulProcessor, stateful_processor.StatefulProcessorHandle]
    theirs += [
        stateful_processor.ListState,
        stateful_processor.MapState,
        stateful_processor.TimerValues,
        GroupState,
    ]
    names = {name for each in theirs for name in dir(each) if not name.startswith("_")}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", page)) == []
