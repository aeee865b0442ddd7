"""Build and metadata of statebackend. This file is the only place that knows either.

Builds share one source tree and never share an object file. The two of every day:

* release (the default): ``-O3``, no checks;
* checked (``STATEBACKEND_DEBUG=1``): Cython's bounds, initialisation and None checks, Python and C
  assertions, and the C macro ``STATEBACKEND_DEBUG``, which turns on the core's own invariants and
  live-object counters.

``STATEBACKEND_SANITIZE=address``, or ``undefined``, or both with a comma, builds either with these sanitizers.

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
import threading
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build as _build
from setuptools.command.build_ext import build_ext as _build_ext

ROOT = Path(__file__).resolve().parent

CHECKED = os.environ.get("STATEBACKEND_DEBUG", "") not in ("", "0")
SANITIZERS = sorted(filter(None, os.environ.get("STATEBACKEND_SANITIZE", "").split(",")))
FLAVOUR = "-".join(["checked" if CHECKED else "release", *SANITIZERS])


# --------------------------------------------------------------------------- the compiled modules


#: For a loop over rows that is written once and compiled for each operation: gcc by itself leaves one copy of so large
#: a function and looks at the operation for every row (get: 7 % slower).
INLINED = tuple(
    argument
    for limit in ("max-inline-insns-single=6000", "large-function-growth=12000", "inline-unit-growth=600")
    for argument in ("--param", limit)
)

#: The module through which tests reach into the core. Every build has it, but no wheel.
PROBE = "statebackend._core.core_probe"
PROBE_SOURCE = "tests/support/core_probe.pyx"
FOR_WHEEL = "bdist_wheel" in sys.argv

#: Flags that only one module needs. Every .pyx of the package is compiled.
OWN_COMPILE_ARGS = {"statebackend._core.kernels.batch_kernels": INLINED}

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


def extensions() -> list[Extension]:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("statebackend/**/*.pyx"))
    }
    if not FOR_WHEEL and (ROOT / PROBE_SOURCE).exists():
        sources[PROBE] = PROBE_SOURCE
    return [
        Extension(
            name,
            [source],
            define_macros=DEFINE_MACROS,
            extra_compile_args=[*COMPILE_ARGS, *OWN_COMPILE_ARGS.get(name, ())],
            extra_link_args=LINK_ARGS,
        )
        for name, source in sources.items()
    ]


# --------------------------------------------------------------------------- the commands


class build(_build):
    """``build``, below the folder of the flavour."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = f"build/{FLAVOUR}"


class Progress:
    """Prints a line for each tenth of the modules, once a step has taken some seconds."""

    def __init__(self, step: str, total: int) -> None:
        self.step, self.total, self.done, self.printed = step, total, 0, 0
        self.start = time.monotonic()
        self.lock = threading.Lock()

    def add(self, count: int = 1) -> None:
        with self.lock:
            self.done += count
            tenths = 10 * self.done // self.total
            if tenths > self.printed and time.monotonic() - self.start > 3:
                self.printed = tenths
                left = self.total - self.done
                print(f"{self.step}: {self.done} of {self.total} modules, {left} left", file=sys.stderr)


class build_ext(_build_ext):
    """``build_ext`` that generates C per flavour, and rebuilds whatever a changed setting makes stale."""

    def run(self) -> None:
        platform = f"{self.plat_name}-{sys.implementation.cache_tag}"
        base = Path("build", FLAVOUR)
        if self.inplace or getattr(self, "editable_mode", False):
            # An editable install asks for throw-away folders here, which would compile everything again.
            self.build_lib = str(base / f"lib.{platform}")
            self.build_temp = str(base / f"temp.{platform}")

        if FOR_WHEEL:
            # A wheel takes the whole folder, where another build may have left the module for tests.
            Path(self.build_lib, self.get_ext_filename(PROBE)).unlink(missing_ok=True)

        fingerprint = base / f"settings.{platform}.json"
        settings = self._settings()
        if not fingerprint.exists() or fingerprint.read_text() != settings:
            fingerprint.unlink(missing_ok=True)
            self.force = True

        self.parallel = self.parallel or os.cpu_count() or 1
        self._generate(str(base / f"c.{platform}"))
        self.progress = Progress("compiling", len(self.extensions))
        super().run()
        fingerprint.parent.mkdir(parents=True, exist_ok=True)
        fingerprint.write_text(settings)

    def _generate(self, folder: str) -> None:
        """Generate C, a tenth of the modules at a time, large and small ones in each."""
        from Cython.Build import cythonize

        by_size = sorted(self.extensions, key=lambda extension: os.path.getsize(extension.sources[0]))
        progress = Progress("generating C", len(by_size))
        for start in range(10):
            some = by_size[start::10]
            generated = cythonize(
                some,
                build_dir=folder,
                compiler_directives=DIRECTIVES,
                emit_linenums=CHECKED,
                force=bool(self.force),
                nthreads=self.parallel if self.parallel > 1 else 0,
                quiet=True,
            )
            sources = {extension.name: extension.sources for extension in generated}
            for extension in some:
                extension.sources = sources[extension.name]
            progress.add(len(some))

    def build_extension(self, extension: Extension) -> None:
        super().build_extension(extension)
        self.progress.add()

    def _settings(self) -> str:
        """What a time stamp cannot show to have changed, as text."""
        import Cython

        return json.dumps(
            {
                "cython": Cython.__version__,
                "python": sys.version,
                "cc": sysconfig.get_config_var("CC"),
                "directives": DIRECTIVES,
                "flags": [DEFINE_MACROS, COMPILE_ARGS, OWN_COMPILE_ARGS, LINK_ARGS],
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
#: SQL over state: `sb.tools.sql`.
SQL = ["duckdb>=1.4"]
#: Readers of state, and the receiver of metrics, that the tests run.
READERS = ["datafusion>=49", "opentelemetry-sdk>=1.30"]
#: The peers of whole batches: the tests run them, too.
FRAMES = ["duckdb>=1.4", "polars>=1.30"]
#: What the tests without Spark need: where a package of these is missing, tests fail.
#: mypy: its stubtest checks the hand-kept stubs of the compiled modules; and with pyright, how handles are typed.
#: pyright fetches its own program when it first runs; where it cannot, that test is skipped.
#: moto: an S3 server on the loopback interface, for the tests of checkpoints in an object store. The same tests have
#: npm install Azurite below build/, where there is npm.
#: cryptography: the AES-GCM of the page about encryption and its example.
#: matplotlib: it draws the pages of the benchmarks. Cython and setuptools: two tests build a package without isolation.
TEST_WITHOUT_SPARK = [
    *CLOUD,
    *FRAMES,
    *READERS,
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
    *FRAMES,
    *READERS,
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
            "sql": SQL,
            "docs": DOCS,
            "lint": LINT,
            "all": sorted({*SPARK, *CLOUD, *DELTA, *METRICS, *SQL, *TEST, *BENCH, *DOCS, *LINT}),
        },
        packages=packages(),
        entry_points={"console_scripts": ["statebackend = statebackend.command_line:main"]},
        package_data={"": ["py.typed", "*.pxd"]},
        include_package_data=False,
        ext_modules=extensions(),
        cmdclass={"build": build, "build_ext": build_ext},
        zip_safe=False,
    )
