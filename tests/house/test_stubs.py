"""The hand-kept .pyi of a compiled module names what the module has, with the same parameters.

What a parameter may be (its type) only the stub knows; what it is called, whether it has a default and how it
may be passed is read from the module, whose signatures Cython embeds in the form that inspect understands.
Constructors carry none, theirs are read from the .pyx.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from house_tools import ROOT, compiled_modules, reads_sources

MODULES = [name for name in compiled_modules() if not name.rpartition(".")[2].startswith("_")]


class Parameter(NamedTuple):
    name: str
    kind: str
    has_default: bool


Signature = tuple[Parameter, ...]
#: Name, or "Class.name", to its parameters; None for what is not called.
Names = dict[str, Signature | None]


def public(name: str) -> bool:
    return not name.startswith("_")


# ----------------------------------------------------------------------------------- the stub's side


def parameters_of(function: ast.FunctionDef, is_method: bool) -> Signature:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    first_default = len(positional) - len(a.defaults)
    found = [Parameter(p.arg, "positional", i >= first_default) for i, p in enumerate(positional)]
    decorators = {d.id for d in function.decorator_list if isinstance(d, ast.Name)}
    if is_method and "staticmethod" not in decorators:
        del found[0]
    if a.vararg:
        found.append(Parameter(a.vararg.arg, "*", False))
    found += [
        Parameter(p.arg, "keyword", default is not None)
        for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    if a.kwarg:
        found.append(Parameter(a.kwarg.arg, "**", False))
    return tuple(found)


def is_property(function: ast.FunctionDef) -> bool:
    names = [d.id if isinstance(d, ast.Name) else getattr(d, "attr", "") for d in function.decorator_list]
    return any(name in ("property", "setter", "deleter") for name in names)


def stub_names(source: str) -> Names:
    found: Names = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                if public(node.name) or (prefix and node.name == "__init__"):
                    signature = None if is_property(node) else parameters_of(node, bool(prefix))
                    found[prefix + node.name] = signature
            elif isinstance(node, ast.ClassDef) and public(node.name):
                found[prefix + node.name] = None
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if public(node.target.id):
                    found[prefix + node.target.id] = None
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
                found.update({prefix + name: None for name in names if public(name)})

    visit(ast.parse(source).body, "")
    return found


# ----------------------------------------------------------------------------------- the module's side


def embedded(function: object, is_method: bool) -> Signature:
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "positional",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    found = [
        Parameter(p.name, kinds[p.kind], p.default is not p.empty)
        for p in inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    ]
    return tuple(found[1:] if is_method else found)


def split_parameters(text: str) -> list[str]:
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [part.strip() for part in [*parts, text[last:]] if part.strip()]


def constructor(source: str, class_name: str) -> Signature | None:
    """The parameters of a class's __init__, else its __cinit__, in Cython source; None if it has neither."""
    start = re.search(rf"^cdef class {class_name}\b[^\n]*:", source, re.M)
    if start is None:
        return None
    body = re.split(r"\n(?=\S)", source[start.end() :], maxsplit=1)[0]
    match = re.search(r"def __init__\s*\(", body) or re.search(r"def __cinit__\s*\(", body)
    if match is None:
        return None
    depth, end = 1, match.end()
    while depth:
        depth += (body[end] in "([{") - (body[end] in ")]}")
        end += 1
    found, kind = [], "positional"
    for part in split_parameters(re.sub(r"#[^\n]*", "", body[match.end() : end - 1]))[1:]:
        if part == "/":
            continue
        if part == "*":
            kind = "keyword"
            continue
        declared, equals, _ = part.partition("=")
        name = re.sub(r"\s+(not|or)\s+None\s*$", "", declared.strip()).split()[-1].lstrip("*&")
        if part.startswith("**"):
            found.append(Parameter(name, "**", False))
        elif part.startswith("*"):
            found.append(Parameter(name, "*", False))
            kind = "keyword"
        else:
            found.append(Parameter(name, kind, bool(equals)))
    return tuple(found)


def module_names(module: ModuleType, source: str) -> Names:
    found: Names = {}
    for name, value in vars(module).items():
        if not public(name) or inspect.ismodule(value):
            continue
        if inspect.isclass(value):
            if value.__module__ != module.__name__:
                continue
            found[name] = None
            init = constructor(source, name)
            if init is not None:
                found[f"{name}.__init__"] = init
            for attribute, member in vars(value).items():
                if public(attribute):
                    is_static = isinstance(member, staticmethod)
                    member = getattr(value, attribute)
                    called = inspect.isroutine(member)
                    bound = inspect.isbuiltin(member)
                    found[f"{name}.{attribute}"] = (
                        embedded(member, not is_static and not bound) if called else None
                    )
        elif inspect.isroutine(value):
            if getattr(value, "__module__", None) == module.__name__:
                found[name] = embedded(value, is_method=False)
        elif name in defined_at_top(source):
            found[name] = None
    return found


def defined_at_top(source: str) -> set[str]:
    """Names that module-level code assigns: constants. What was imported is not the module's own."""
    return set(re.findall(r"^([A-Za-z]\w*)\s*(?::[^=\n]+)?=(?!=)", source, re.M))


# ----------------------------------------------------------------------------------- the comparison


def differences(module: Names, stub: Names) -> list[str]:
    def show(signature: Signature | None) -> str:
        if signature is None:
            return "not called"
        shown = [f"{p.name}{'=' if p.has_default else ''} ({p.kind})" for p in signature]
        return ", ".join(shown) or "no parameters"

    found = [f"{name}: in the module, not in the stub" for name in sorted(module.keys() - stub.keys())]
    found += [f"{name}: in the stub, not in the module" for name in sorted(stub.keys() - module.keys())]
    found += [
        f"{name}: module has {show(module[name])}; stub has {show(stub[name])}"
        for name in sorted(module.keys() & stub.keys())
        if module[name] != stub[name]
    ]
    return found


@reads_sources
@pytest.mark.parametrize("name", MODULES)
def test_the_stub_says_what_the_module_has(name: str) -> None:
    path = ROOT / Path(*name.split("."))
    stub = path.with_suffix(".pyi")
    assert stub.exists(), f"{name} has no stub"
    source = path.with_suffix(".pyx").read_text(encoding="utf-8")
    found = differences(
        module_names(importlib.import_module(name), source), stub_names(stub.read_text(encoding="utf-8"))
    )
    assert found == []


@pytest.mark.slow
@pytest.mark.skipif(not MODULES, reason="nothing compiled is built")
def test_stubtest_agrees(tmp_path: Path) -> None:
    # Cython puts these into every module; constructors are checked above, from the source.
    names = [r"__pyx_\w+__", "__test__", "__(reduce|setstate)_cython__", "__(init|new|reduce|setstate)__"]
    allow = tmp_path / "allow"
    allow.write_text("\n".join(rf".*\.{name}" for name in names))
    options = ["--concise", "--ignore-missing-stub", "--ignore-unused-allowlist", "--ignore-disjoint-bases"]
    options += ["--mypy-config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", *options, "--allowlist", str(allow), *MODULES],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


PYX = """
cdef class Map:
    def __cinit__(self, long width, *, tuple seed not None=(1, 2), double load = max(1, 2)):
        pass

    def get(self, key):
        pass

cdef class Bare:
    pass
"""


def test_a_constructor_is_read_from_source() -> None:
    assert constructor(PYX, "Map") == (
        Parameter("width", "positional", False),
        Parameter("seed", "keyword", True),
        Parameter("load", "keyword", True),
    )
    assert constructor(PYX, "Bare") is None


@pytest.mark.parametrize(
    ("stub", "complaint"),
    [
        ("def f(a: int, *, b: int = ...) -> int: ...", None),
        ("def f(a: int, b: int = ...) -> int: ...", "f: module has a (positional), b= (keyword); stub has"),
        ("def f(x: int, *, b: int = ...) -> int: ...", "stub has x (positional), b= (keyword)"),
        ("", "f: in the module, not in the stub"),
        ("def f(a: int, *, b: int = ...) -> int: ...\ng: int", "g: in the stub, not in the module"),
    ],
)
def test_a_stub_that_differs_is_found(stub: str, complaint: str | None) -> None:
    module = {"f": (Parameter("a", "positional", False), Parameter("b", "keyword", True))}
    found = differences(module, stub_names(stub))
    assert found == [] if complaint is None else complaint in found[0]
