"""Build and metadata of statebackend. This file is the only place that knows either.

Builds share one source tree and never share an object file. The two of every day:

* release (the default): ``-O3``, no checks;
* checked (``STATEBACKEND_DEBUG=1``): Cython's bounds, initialisation and None checks, Python and C
  assertions, and the C macro ``STATEBACKEND_DEBUG``, which turns on the core's own invariants and
  live-object counters.

Two variables make variants of them, for tests:

* ``STATEBACKEND_LOOK_AHEAD=0``: no memory is read whose contents are only guessed, see `look_ahead.pxd`;
* ``STATEBACKEND_SANITIZE=address``, or ``undefined``, or both with a comma: with these sanitizers.

Each writes below its own folder, such as ``build/release`` or ``build/checked-address``: generated C, objects
and linked modules. What ``build_ext --inplace`` then puts next to the sources is a copy, renewed whenever it differs
from that build, so that switching costs a copy and can never leave a module of the other build behind.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build import build as _build
from setuptools.command.build_ext import build_ext as _build_ext

ROOT = Path(__file__).resolve().parent

CHECKED = os.environ.get("STATEBACKEND_DEBUG", "") not in ("", "0")
LOOK_AHEAD = os.environ.get("STATEBACKEND_LOOK_AHEAD", "") != "0"
SANITIZERS = sorted(filter(None, os.environ.get("STATEBACKEND_SANITIZE", "").split(",")))
FLAVOUR = "-".join(
    ["checked" if CHECKED else "release", *([] if LOOK_AHEAD else ["without-look-ahead"]), *SANITIZERS]
)


# --------------------------------------------------------------------------- the compiled modules


class Module(NamedTuple):
    """One compiled module: what it is for, and the flags that only it needs."""

    note: str
    compile_args: tuple[str, ...] = ()


#: For a loop over rows that is written once and compiled for each operation: gcc by itself leaves one copy of so large
#: a function and looks at the operation for every row (get: 7 % slower).
INLINED = tuple(
    argument
    for limit in ("max-inline-insns-single=6000", "large-function-growth=12000", "inline-unit-growth=600")
    for argument in ("--param", limit)
)

#: Every compiled module of the package. A .pyx that is not named here is an error, so that none is left
#: out of a wheel by accident.
MODULES: dict[str, Module] = {
    "statebackend._core.key_groups": Module("Murmur3 as Spark computes it, scalar and batch; ranges"),
    "statebackend._core.pulse": Module("signs of life between processes, by threads that need no GIL"),
    "statebackend._core.crc32c": Module("CRC-32C, by the processor's instruction where it has one"),
    "statebackend._core.memory.extents": Module(
        "memory from the system, and the thread that makes some ahead"
    ),
    "statebackend._core.memory.arena": Module(
        "extents cut into page runs; size-classed bytes; live counters"
    ),
    "statebackend._core.memory.blob_columns": Module("the bytes of many blobs as one column"),
    "statebackend._core.memory.collecting": Module("collections that wait, counted once for all"),
    "statebackend._core.memory.byte_rows": Module("rows of bytes as offsets and data"),
    "statebackend._core.memory.journal": Module("undo segments of marks; the dirty set"),
    "statebackend._core.tables.cow_map": Module(
        "entries, copy-on-write map, snapshot view, visitor: one unit"
    ),
    "statebackend._core.tables.invariants": Module("verification of maps"),
    "statebackend._core.tables.state_core": Module(
        "versions, marks and snapshots of all tables of a backend"
    ),
    "statebackend._core.tables.namespaces": Module("namespaces by number"),
    "statebackend._core.tables.lists": Module("list values: chunks that only grow"),
    "statebackend._core.tables.state_table": Module(
        "key groups -> maps of one state, one operation at a time"
    ),
    "statebackend._core.tables.entry_views": Module(
        "entries seen from Python: slots, iteration, the visitor"
    ),
    "statebackend._core.snapshots.entry_rows": Module("entries of a moment as rows, and their columns"),
    "statebackend._core.snapshots.snapshot_view": Module("the reader's side of a snapshot"),
    "statebackend._core.snapshots.changes": Module("what has changed since a mark, as rows"),
    "statebackend._core.tables.map_table": Module("map states: entries threaded by key, in insertion order"),
    "statebackend._core.batches.kernels": Module(
        "batch operations without the GIL, over threads by key group", INLINED
    ),
    "statebackend._core.codecs.decimals": Module("decimals to integers and back, without Python's methods"),
    "statebackend._core.codecs.type_codec": Module(
        "Python objects to the bytes of a declared type, and back"
    ),
    "statebackend._core.codecs.value_bytes": Module("values of a type to stored bytes, and back"),
    "statebackend._core.codecs.codecs": Module("Python objects to stored values and keys, and back"),
    "statebackend._core.codecs.nested_columns": Module("what writing and reading nested columns share"),
    "statebackend._core.codecs.nested_writing": Module(
        "Arrow's buffers of nested types to stored values and keys"
    ),
    "statebackend._core.codecs.nested_reading": Module(
        "stored values and keys of nested types to Arrow's buffers"
    ),
    "statebackend._core.codecs.row_maker": Module("rows as Python objects out of Arrow's buffers"),
    "statebackend._core.codecs.row_writer": Module("rows as Python objects to columns that grow"),
    "statebackend._core.handles.look_ahead": Module("asking for memory that the next keys will need"),
    "statebackend._core.handles.key_shape": Module("bytes of keys from where their objects lie"),
    "statebackend._core.handles.key_context": Module("the current key, namespace and time"),
    "statebackend._core.handles.base_handle": Module(
        "the tables of a state, and the place of the current key's entry"
    ),
    "statebackend._core.handles.cleanup": Module("handles: removal of what has expired"),
    "statebackend._core.handles.enumeration": Module("handles: the keys and namespaces of a state"),
    "statebackend._core.handles.handle": Module("what the handles of all states have in common"),
    "statebackend._core.handles.single_handle": Module("handles of states with one value for a key"),
    "statebackend._core.handles.row_loop": Module("the loop of a job that goes row by row"),
    "statebackend._core.handles.function_handles": Module(
        "handles of states that call the user's function for each value"
    ),
    "statebackend._core.handles.list_handle": Module("the handle of list states"),
    "statebackend._core.handles.map_handle": Module("the handle of map states"),
    "statebackend._core.tables.sweeping": Module(
        "finding what has expired: a walk, and an index of when it is due"
    ),
    "statebackend._core.handles.time_index": Module(
        "timers: their set, and the queue in the order of firing"
    ),
    "statebackend._core.handles.timer_columns": Module("many timers at once, as columns"),
    "statebackend._core.tables.accumulators": Module("what a stored value becomes when another is added"),
    "statebackend._core.batches.adding_kernels": Module("batches of additions to reductions and aggregates"),
    "statebackend._core.batches.gathering": Module("values and lists of many entries as columns"),
    "statebackend._core.batches.expiring_kernels": Module("batches of reads where values expire"),
    "statebackend._core.batches.map_kernels": Module("batches over map states"),
    "statebackend._core.row_digest": Module("hashes of columns, added up row by row"),
    "statebackend._core.rocksdb.library": Module(
        "RocksDB's C API, from a library opened at run time; errors"
    ),
    "statebackend._core.rocksdb.callbacks": Module("the compaction filter and the merge operator"),
    "statebackend._core.rocksdb.options": Module("options of databases, and their shared memory"),
    "statebackend._core.rocksdb.database": Module("a database and its column families"),
    "statebackend._core.rocksdb.batches": Module("batches of writes"),
    "statebackend._core.rocksdb.iterators": Module("iterators within bounds"),
    "statebackend._core.rocksdb.composite_keys": Module(
        "key groups, keys, namespaces and map keys as one key"
    ),
    "statebackend._core.rocksdb.value_layouts": Module("timestamps, nulls and lengths beside stored values"),
    "statebackend._core.rocksdb.sorted_rows": Module("rows in the order of their keys, and some of them"),
    "statebackend._core.rocksdb.ordered_reads": Module("reads of many keys in the order of the database"),
    "statebackend._core.rocksdb.noted_keys": Module("keys that have changed, and what has become of each"),
    "statebackend._core.rocksdb.table_files": Module("files of rows that a database takes in whole"),
    "statebackend._core.rocksdb.overlay": Module("what an open batch has changed, and how to take it back"),
    "statebackend._core.rocksdb.walks": Module("walks over the database and the open batch together"),
    "statebackend._core.rocksdb.store": Module("reads and writes at the current key, and of many keys"),
    "statebackend._core.rocksdb.held": Module("values that were read, apart from RocksDB"),
    "statebackend._core.rocksdb.current_key": Module("the current key, namespace and time on RocksDB"),
    "statebackend._core.rocksdb.base_handle": Module("what the handles of all states on RocksDB share"),
    "statebackend._core.rocksdb.single_handles": Module("handles of one value for a key on RocksDB"),
    "statebackend._core.rocksdb.list_handle": Module("the handle of list states on RocksDB"),
    "statebackend._core.rocksdb.map_handle": Module("the handle of map states on RocksDB"),
    "statebackend._core.handles.adding_handles": Module("the scalar handles of operations with a name"),
}

#: The directives of every module, and the only place where one is set.
DIRECTIVES: dict[str, object] = {
    "language_level": 3,
    "boundscheck": CHECKED,
    "initializedcheck": CHECKED,
    "nonecheck": CHECKED,
    "wraparound": False,
    "cdivision": True,
    # A method called once per record is a plain C method descriptor: the interpreter specialises calls of
    # those, which was measured as 3 ns of 13 against Cython's own function type. The price, no
    # inspect.signature, is paid back by writing the signature in the form that CPython itself reads.
    "binding": False,
    "embedsignature": True,
    "embedsignature.format": "clinic",
}

#: STATEBACKEND_DEBUG is defined in the checked build only, so that both #if and #ifdef mean the same.
DEFINE_MACROS: list[tuple[str, str | None]] = [("STATEBACKEND_DEBUG", "1")] if CHECKED else [("NDEBUG", None)]
if not LOOK_AHEAD:
    DEFINE_MACROS.append(("STATEBACKEND_LOOK_AHEAD", "0"))

COMPILE_ARGS: list[str] = [
    # Pages are read through pointers of the type that is stored in them, not the one they were made as.
    "-fno-strict-aliasing",
    # Sums and variances are the same on every processor: no fused multiply-add behind our back.
    "-ffp-contract=off",
    # Generated C names temporaries and helpers that it may not use.
    "-Wno-unused-variable",
    "-Wno-unused-function",
    # No -march=native: a wheel runs on the oldest processor of its platform.
    *(["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"] if CHECKED else ["-O3", "-g0"]),
]
LINK_ARGS: list[str] = []
if sys.platform.startswith("linux"):
    COMPILE_ARGS.append("-pthread")
    LINK_ARGS.append("-pthread")
for _sanitizer in SANITIZERS:
    COMPILE_ARGS.append(f"-fsanitize={_sanitizer}")
    LINK_ARGS.append(f"-fsanitize={_sanitizer}")


def cython_sources() -> list[Path]:
    return sorted(path for pattern in ("*.pyx", "*.pxd") for path in ROOT.glob(f"statebackend/**/{pattern}"))


def extensions() -> list[Extension]:
    """The extensions to build: every module of the table that has a source."""
    on_disk = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.relative_to(ROOT)
        for path in cython_sources()
        if path.suffix == ".pyx"
    }
    unknown = sorted(on_disk.keys() - MODULES.keys())
    if unknown:
        raise SystemExit(f"setup.py: not in the table MODULES: {', '.join(unknown)}")

    include_dirs: list[str] = []
    macros = list(DEFINE_MACROS)
    if any(
        re.search(r"^\s*(cimport numpy|from numpy\S* cimport)", p.read_text(), re.M) for p in cython_sources()
    ):
        import numpy

        include_dirs.append(numpy.get_include())
        macros.append(("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"))

    return [
        Extension(
            name,
            [on_disk[name].as_posix()],
            include_dirs=include_dirs,
            define_macros=macros,
            extra_compile_args=[*COMPILE_ARGS, *module.compile_args],
            extra_link_args=LINK_ARGS,
        )
        for name, module in MODULES.items()
        if name in on_disk
    ]


# --------------------------------------------------------------------------- the commands


def is_stale(before: dict[str, list[list[object]]], now: dict[str, list[list[object]]]) -> bool:
    """Whether modules must be built again because of settings: not because others have been added or removed."""
    modules_before, modules = (
        {each[0]: each for each in settings.pop("modules")} for settings in (before, now)
    )
    return before != now or any(modules_before.get(name, each) != each for name, each in modules.items())


class build(_build):
    """``build``, below the folder of the flavour."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = f"build/{FLAVOUR}"


class build_ext(_build_ext):
    """``build_ext`` that generates C per flavour, and rebuilds whatever a changed setting makes stale."""

    def run(self) -> None:
        if not self.extensions:
            return
        from Cython.Build import cythonize

        platform = f"{self.plat_name}-{sys.implementation.cache_tag}"
        base = Path("build", FLAVOUR)
        if self.inplace or getattr(self, "editable_mode", False):
            # An editable install asks for throw-away folders here, which would compile everything again.
            self.build_lib = str(base / f"lib.{platform}")
            self.build_temp = str(base / f"temp.{platform}")

        fingerprint = base / f"settings.{platform}.json"
        settings = self._settings()
        if not fingerprint.exists() or is_stale(json.loads(fingerprint.read_text()), json.loads(settings)):
            fingerprint.unlink(missing_ok=True)
            self.force = True

        jobs = self.parallel or os.cpu_count() or 1
        generated = cythonize(
            self.extensions,
            build_dir=str(base / f"c.{platform}"),
            compiler_directives=DIRECTIVES,
            emit_linenums=CHECKED,
            force=bool(self.force),
            nthreads=min(jobs, len(self.extensions)) if jobs > 1 else 0,
        )
        sources = {extension.name: extension.sources for extension in generated}
        for extension in self.extensions:
            extension.sources = sources[extension.name]
        self.parallel = jobs
        super().run()
        fingerprint.parent.mkdir(parents=True, exist_ok=True)
        fingerprint.write_text(settings)

    def _settings(self) -> str:
        """What a time stamp cannot show to have changed, as text."""
        import Cython

        return json.dumps(
            {
                "cython": Cython.__version__,
                "python": sys.version,
                "cc": sysconfig.get_config_var("CC"),
                "directives": DIRECTIVES,
                "modules": [
                    (e.name, e.define_macros, e.include_dirs, e.extra_compile_args, e.extra_link_args)
                    for e in self.extensions
                ],
                "environment": {
                    n: os.environ.get(n) for n in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "ARCHFLAGS")
                },
            },
            indent=1,
        )

    def copy_extensions_to_source(self) -> None:
        """Put this flavour's modules next to the sources, replacing whatever other build is there.

        By name and not in place: a running interpreter keeps the file that it has mapped.
        """
        for extension in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(extension.name)))
            target = ROOT / self.get_ext_filename(extension.name)
            if target.exists() and filecmp.cmp(built, target, shallow=False):
                continue
            aside = target.with_name(target.name + ".new")
            shutil.copy2(built, aside)
            os.replace(aside, target)


# --------------------------------------------------------------------------- the metadata

#: Where the project lives: the one place that says so. mkdocs.yml repeats it, and a test compares the two.
PROJECT_URL = "https://github.com/statebackend/statebackend"

#: pyspark 4.0: `DataFrame.toArrow` came with it, and data sources in Python.
#: pandas: what PySpark's Arrow path imports; PySpark does not work with pandas 3 yet.
SPARK = ["pyspark>=4.0", "pandas>=2.2,<3"]
#: What Spark Connect imports beside PySpark itself, and so does `transformWithState` in Python.
CONNECT = [
    "grpcio>=1.76",
    "grpcio-status>=1.76",
    "googleapis-common-protos>=1.71",
    "protobuf>=6",
    "zstandard>=0.25",
]
#: Stores in object stores.
CLOUD = ["obstore>=0.10"]
#: The sink that writes to Delta Lake tables.
DELTA = ["deltalake>=1.2"]
#: Progress for Prometheus.
METRICS = ["prometheus-client>=0.20"]
#: What the tests without Spark need: where a package of these is missing, tests fail.
#: mypy: with pyright, it checks how handles are typed.
#: pyright fetches its own program when it first runs; where it cannot, that test is skipped.
#: moto: an S3 server on the loopback interface, for the tests of checkpoints in an object store. The same tests have
#: npm install Azurite below build/, where there is npm.
#: cryptography: the AES-GCM of the page about encryption and its example.
#: matplotlib: it draws the pages of the benchmarks. Cython and setuptools: two tests build a package without isolation.
TEST_WITHOUT_SPARK = [
    *CLOUD,
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "mypy>=1.11",
    "pyright>=1.1.390",
    "moto[server]>=5",
    "cryptography>=43",
    "matplotlib>=3.8",
    "Cython>=3.1,<4",
    "setuptools>=77",
]
#: All that the tests need.
TEST = [*SPARK, *CONNECT, *DELTA, *METRICS, *TEST_WITHOUT_SPARK]
LINT = ["ruff>=0.6", "mypy>=1.11", "cython-lint>=0.16"]
#: ruff: it breaks long signatures of the reference into lines.
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27", "ruff>=0.6"]
#: The peers: Flink's jars; and what `transformWithState` in Python needs beside PySpark itself. matplotlib: the plots.
BENCH = [
    *SPARK,
    *CONNECT,
    *DELTA,
    "pytest>=8",
    "pytest-benchmark>=5",
    "psutil>=6",
    "apache-flink-libraries==2.3.0",
    "matplotlib>=3.8",
]


def version() -> str:
    text = (ROOT / "statebackend" / "_version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
    if found is None:
        raise SystemExit('setup.py: statebackend/_version.py has no line __version__ = "..."')
    return found.group(1)


def long_description() -> str:
    """The README as a package index shows it: there, a relative link would lead nowhere."""

    def absolute(match: re.Match[str]) -> str:
        view = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({PROJECT_URL}/{view}/main/{match['target']})"

    link = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)\]\((?!#|[a-z]+:)(?P<target>[^)\s]+)\)")
    parts = re.split(r"(^```.*?^```$)", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    return "".join(part if part.startswith("```") else link.sub(absolute, part) for part in parts)


def packages() -> list[str]:
    return sorted(
        ".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("statebackend/**/__init__.py")
    )


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        name="statebackend",
        version=version(),
        description="Keyed state for stream processing in Python: Flink's heap backend, compiled",
        long_description=long_description(),
        long_description_content_type="text/markdown",
        author="The statebackend authors",
        url=PROJECT_URL,
        project_urls={
            "Source": PROJECT_URL,
            "Documentation": f"{PROJECT_URL}/blob/main/docs/README.md",
            "Changelog": f"{PROJECT_URL}/blob/main/CHANGELOG.md",
            "Issues": f"{PROJECT_URL}/issues",
            "Security": f"{PROJECT_URL}/blob/main/SECURITY.md",
        },
        license="Apache-2.0",
        license_files=["LICENSE"],
        keywords=["stream processing", "state", "Flink", "Spark", "Structured Streaming", "checkpoint"],
        classifiers=[
            "Development Status :: 3 - Alpha",
            "Intended Audience :: Developers",
            "Intended Audience :: Science/Research",
            "Operating System :: MacOS",
            "Operating System :: POSIX :: Linux",
            "Programming Language :: Cython",
            "Programming Language :: Python",
            "Programming Language :: Python :: 3",
            "Programming Language :: Python :: 3 :: Only",
            *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
            "Programming Language :: Python :: Implementation :: CPython",
            "Topic :: Database",
            "Topic :: Software Development :: Libraries :: Python Modules",
            "Topic :: System :: Distributed Computing",
            "Typing :: Typed",
        ],
        python_requires=">=3.10",
        install_requires=["numpy>=1.26", "pyarrow>=18"],
        extras_require={
            "spark": SPARK,
            "cloud": CLOUD,
            "delta": DELTA,
            "metrics": METRICS,
            "test": TEST,
            "test-without-spark": TEST_WITHOUT_SPARK,
            "bench": BENCH,
            "docs": DOCS,
            "lint": LINT,
            "all": sorted({*SPARK, *CLOUD, *DELTA, *METRICS, *TEST, *BENCH, *DOCS, *LINT}),
        },
        packages=packages(),
        package_data={"": ["py.typed", "*.pxd"]},
        include_package_data=False,
        ext_modules=extensions(),
        cmdclass={"build": build, "build_ext": build_ext},
        zip_safe=False,
    )
