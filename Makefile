# Every verb works on a fresh machine: it creates .venv, installs what it needs and builds in place.
# Repeated calls reinstall only when setup.py, pyproject.toml or the version change.
#
#   PYTHON       the interpreter that .venv is made with (python3)
#   PYTEST_ARGS  more arguments for pytest: make test PYTEST_ARGS='-k key_groups -x'
#   BACKEND      the demo's state backend: heap, or rocksdb
#   MODE         the demo's processes with state: driver, or executors of a small cluster on this machine
#   WORKERS      processes that the tests are shared out to (one for each core); 0: in pytest's own, as for --pdb

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Hundreds of processes of the tests import the same modules: the first keeps what it has compiled.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= auto
BACKEND ?= heap
MODE ?= driver

VENV := .venv
PY := $(VENV)/bin/python
CREATED := $(VENV)/created
STAMP := $(VENV)/installed
CLASSES := build/spark-classes.jsa
SETTINGS := setup.py pyproject.toml statebackend/_version.py

BUILD := $(PY) setup.py -q build_ext --inplace
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal

# What runs under sanitizers: the compiled code's own tests, and those of every state.
SANITIZED ?= tests/core tests/heap tests/rocksdb tests/contract

.PHONY: help demo test test-changed debug nightly asan ubsan bench docs lint format clean

help:
	@echo 'make demo   build, then run python -m statebackend.demo; BACKEND=rocksdb, MODE=executors'
	@echo 'make test   release build, the test suite'
	@echo 'make test-changed  release build, the tests of what has changed since main: about a minute'
	@echo 'make debug  checked build (bounds checks, invariants, live counters), the test suite'
	@echo 'make nightly  checked build, the test suite with all cases of each test, and the stress tests: hours'
	@echo 'make asan   checked build under AddressSanitizer, tests of the core and of the states; ubsan: undefined behaviour'
	@echo 'make bench  benchmarks, with the peers in the same run'
	@echo 'make docs   HTML pages in build/docs'
	@echo 'make lint   ruff, mypy, cython-lint, words'
	@echo 'make format rewrite the Python files as ruff wants them'
	@echo 'make clean  remove everything built; keeps .venv'
	@echo
	@echo 'PYTHON=python3.12 picks the interpreter, PYTEST_ARGS="-k name" narrows test, debug and bench.'

# --- the environment -------------------------------------------------------------------------------------

$(CREATED): scripts/make_venv.sh
	@scripts/make_venv.sh '$(PYTHON)'
	@touch $@

# One stamp per set of extras: .venv/installed.<extras, joined by +>, "none" for the library alone.
comma := ,
$(STAMP).%: $(CREATED) $(SETTINGS)
	@echo 'building statebackend, then installing it with extras $* into $(VENV)'
	@$(PY) -m pip install -q --disable-pip-version-check -r $(VENV)/build-requirements.txt
	@$(BUILD)
	@PYTHONWARNINGS=ignore $(PY) -m pip install -q --disable-pip-version-check --no-build-isolation \
	    -e '.$(if $(filter none,$*),,[$(subst +,$(comma),$*)])'
	@touch $@

# --- the verbs -------------------------------------------------------------------------------------------

# The two builds. STATEBACKEND_DEBUG picks one in setup.py, STATEBACKEND_BUILD says which one the tests must
# find. (Set for a verb, these hold for its prerequisites too: the install already builds the right one.)
demo test test-changed bench: export STATEBACKEND_DEBUG := 0
demo test test-changed bench: export STATEBACKEND_BUILD := release
debug nightly: export STATEBACKEND_DEBUG := 1
debug nightly: export STATEBACKEND_BUILD := checked
debug nightly: export PYTHONDEVMODE := 1

demo: $(STAMP).spark
	@scripts/check_java.sh
	@$(BUILD)
	@$(PY) -m statebackend.demo --backend $(BACKEND) --mode $(MODE)

test: $(STAMP).test+spark $(CLASSES)
	@$(BUILD)
	@$(PYTEST) $(PYTEST_ARGS)

test-changed: $(STAMP).test+spark
	@$(BUILD)
	@tests=$$($(PY) scripts/changed_tests.py); \
	    [ -z "$$tests" ] || $(PYTEST) -m 'not slow and not spark' $$tests $(PYTEST_ARGS)

# The JVMs of the tests start in half the time with it. Not every Java can write one.
$(CLASSES): $(STAMP).test+spark
	@$(PY) tests/support/spark_classes.py $@ >/dev/null 2>&1 || echo 'JVMs start without an archive of classes'

debug: $(STAMP).test+spark
	@$(BUILD)
	@$(PYTEST) $(PYTEST_ARGS)

nightly: $(STAMP).test+spark
	@$(BUILD)
	@$(PYTEST) --stress $(PYTEST_ARGS)

# Sanitizers. The package is built as a whole into a folder of its own, so the modules next to the sources stay what they
# are. PYTHONSAFEPATH keeps those out of the tests' subprocesses (from Python 3.11 on). Without PYTHONMALLOC a sanitizer
# would see the interpreter's arenas, but no object in them. What the interpreter itself never frees is no leak. Reports
# go to files, because pytest keeps the output of a process that ends at once. AddressSanitizer looks for C++'s exceptions
# when it begins, and RocksDB throws some: so libstdc++ is there from the beginning.
asan: SANITIZER := address
asan: PRELOADED = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libstdc++.so)
ubsan: SANITIZER := undefined
asan ubsan: OWN = $(CURDIR)/build/checked-$(SANITIZER)
asan ubsan: $(STAMP).test+spark
	@STATEBACKEND_DEBUG=1 STATEBACKEND_SANITIZE=$(SANITIZER) $(PY) setup.py -q build --build-lib $(OWN)/package
	@rm -f $(OWN)/report.*
	@STATEBACKEND_BUILD=checked PYTHONPATH=$(OWN)/package PYTHONSAFEPATH=1 PYTHONMALLOC=malloc \
	    ASAN_OPTIONS=detect_leaks=0:log_path=$(OWN)/report UBSAN_OPTIONS=log_path=$(OWN)/report \
	    LD_PRELOAD='$(PRELOADED)' $(VENV)/bin/pytest -m 'not spark' $(SANITIZED) $(PYTEST_ARGS); \
	    status=$$?; ! cat $(OWN)/report.* 2>/dev/null && exit $$status

bench: $(STAMP).bench
	@scripts/check_java.sh || echo 'going on without Java: the Flink and Spark peers are skipped'
	@$(BUILD)
	@$(PY) -m pytest bench $(PYTEST_ARGS)

# The variable hides the theme's notice about versions of mkdocs to come. Warnings of the build stay errors.
docs: $(STAMP).docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet --config-file mkdocs.yml --site-dir build/docs
	@echo 'build/docs/index.html'

lint: $(STAMP).lint
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint $$(find statebackend tests -name '*.pyx' -o -name '*.pxd')
	@$(PY) scripts/words.py

format: $(STAMP).lint
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find statebackend -name '*.so' -delete -o -name '*.so.new' -delete -o -name '__pycache__' -prune -exec rm -rf {} +
	@find tests bench examples -name '__pycache__' -prune -exec rm -rf {} + 2>/dev/null || true
