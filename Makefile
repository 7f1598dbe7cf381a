# Each target sets up what it needs (.ci/setup) and builds what has changed; `make help` lists them.
SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint docs docs-serve build release compatibility bench gpu offline without-network clean sanitize test-core test-cost test-python

PYTHON ?= python3
FOR ?= python3
OFFLINE ?=
T ?=
ARGS ?=
PYTHONS ?=
venv := .venv$(if $(OFFLINE),-offline)
say = @printf '\n== %s\n'
tools := PATH="$(CURDIR)/$(venv)/bin:$$PATH"
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
# Container images set it. Tests start hundreds of processes, each of which would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE

# What the extension is made of. Python sources are read from src/ directly and need no build.
inputs := CMakeLists.txt pyproject.toml $(shell find core cmake -type f) $(shell find core cmake -type d)

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22
	@echo "Variables: PYTHON=python3 (3.11 or newer, to make .venv), T=one test, ARGS=\"arguments of the command\""

demo: build  ## train a language model over Gloo, telegrad dense and telegrad sparse, and compare (ARGS="--help")
	@$(venv)/bin/telegrad demo $(ARGS)

bench: build  ## measure allreduce beside its peers (ARGS="--ranks 4 --json FILE")
	@$(venv)/bin/telegrad bench allreduce $(ARGS)

# Not part of `make test`, which runs the same tests in Triton's interpreter. No GPU is no failure.
gpu: $(if $(OFFLINE),without-network,build)  ## tests and benchmarks on this machine's GPU (ARGS="--parts tests,overlap"; OFFLINE=.offline)
	@$(venv)/bin/python benchmarks/gpu/run.py $(ARGS)

without-network:
	@OFFLINE='$(OFFLINE)' PYTHON='$(PYTHON)' .ci/setup

offline: build  ## what `make gpu OFFLINE=.offline` needs where there is no network (FOR=python3.12: the Python there)
	@FOR='$(FOR)' .ci/offline

build: $(venv)/built  ## compile the core and install telegrad into .venv, editable

release: $(venv)/ready  ## the sdist and wheels that can be published, in dist/, checked (PYTHONS="python3.11 python3.12")
	@PYTHONS='$(PYTHONS)' $(if $(PLAT),PLAT='$(PLAT)') .ci/release

# Not in CI: an environment for each row, of 5 GB where pip brings torch for CUDA, and an hour of tests.
compatibility: $(venv)/built  ## tests with the oldest and newest torch, numpy, Triton, into docs/reference/compatibility.md (ARGS="--rows oldest")
	@rm -rf build/compatibility/wheel
	@$(tools) $(venv)/bin/python -m pip wheel -qq --disable-pip-version-check --no-build-isolation --no-deps -w build/compatibility/wheel \
	  --config-settings=build-dir=build/py --config-settings=cmake.define.TELEGRAD_BUILT="$(CURDIR)/build/core" .
	@$(venv)/bin/python tests/compatibility/run_compatibility.py --wheel build/compatibility/wheel/telegrad-*.whl $(ARGS)

ifeq ($(T),)
test: test-core lint test-python  ## C++ tests, lint, Python tests; T=tests/…/file.py::name or T=tests/core/file.cpp: one
else ifneq ($(filter tests/core/%,$(T)),)
test: test-core
else
test: test-python
endif

lint: $(venv)/ready  ## ruff, mypy, and the sentences of README, docs and docstrings
	$(say) "Lint: ruff, mypy, prose"
	@$(venv)/bin/ruff check .
	@$(venv)/bin/ruff format --check .
	@$(venv)/bin/mypy
	@$(venv)/bin/python tests/check_prose.py

# With --quiet, MkDocs 1.6 hides warnings from --strict and exits 0. Material is maintained until May 2027.
docs: build  ## build the site of docs/ into build/site; every warning is an error
	@NO_MKDOCS_2_WARNING=1 $(venv)/bin/mkdocs build --strict
	@echo "build/site/index.html"

docs-serve: build  ## show the site on http://localhost:8000 and build it anew as pages change
	@NO_MKDOCS_2_WARNING=1 $(venv)/bin/mkdocs serve

# Two builds of their own, of the C++ tests only. ThreadSanitizer runs the engine over `local` and all ranks of `sim`; UCX's
# own threads and locks are not instrumented.
sanitize: $(venv)/ready  ## C++ tests with AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
	@$(call sanitized,address,asan,wheel,auto)
	@$(call sanitized,thread,tsan,none,off)

# sanitizer, folder, UCX, MPI. halt_on_error: the first finding fails its test. ThreadSanitizer runs without foreign networks:
# MPICH's memory hooks take locks in threads that have ended for it, where it crashes, and it does not see timed locks.
define sanitized
printf '\n== %s sanitizer: build\n' $(1)
$(tools) cmake -S core -B build/$(2) -G Ninja --log-level=WARNING -DTELEGRAD_SANITIZE=$(1) -DTELEGRAD_UCX=$(3) -DTELEGRAD_MPI=$(4) \
  -Ducx_ROOT="$$($(venv)/bin/python -c 'import libucx; print(*libucx.__path__)')" $(ccache)
$(tools) cmake --build build/$(2)
printf '\n== %s sanitizer: tests\n' $(1)
$(tools) TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 LSAN_OPTIONS="suppressions='$(CURDIR)/tests/core/leaks.supp'" \
  ctest --test-dir build/$(2) --output-on-failure --no-tests=error -j$(CMAKE_BUILD_PARALLEL_LEVEL)
endef
ccache := $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)

clean:  ## remove what was built; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis $(venv)/built
	find src lab tests -name __pycache__ -prune -exec rm -rf {} +

test-core: werror := -DTELEGRAD_WERROR=ON
test-core: $(venv)/ready
	$(say) "C++ core: build with warnings as errors, without Python and torch"
	@$(configure_core)
	@$(tools) cmake --build build/core $(if $(T),--target $(notdir $(basename $(T))))
	$(say) "C++ core: tests"
	@$(tools) ctest --test-dir build/core --output-on-failure --no-tests=error -j$(CMAKE_BUILD_PARALLEL_LEVEL) \
	  $(if $(T),-R '^$(notdir $(basename $(T)))$$')

# Warnings are errors once `make test` has said so: the extension is linked with the same library, compiled once.
configure_core = $(tools) cmake -S core -B build/core -G Ninja --log-level=WARNING $(werror) -DTELEGRAD_UCX=wheel \
  -Ducx_ROOT="$$($(venv)/bin/python -c 'import libucx; print(*libucx.__path__)')"

# Three files at a time: many tests wait, for processes that start or for a time-out, and files share what they set up. The
# longest first (tests/conftest.py): in xdist's own order, by number of tests, long files of few tests would come last and alone.
test-python: $(venv)/built
	$(say) "Python tests"
	@$(venv)/bin/python -m pytest $(if $(T),'$(T)',-n 3 --dist loadfile --no-loadscope-reorder)

test-cost: export TELEGRAD_TEST_COST = 1
test-cost: test-python  ## the Python tests, and the CPU seconds of files and tests that take most

$(venv)/ready: .ci/setup constraints.txt pyproject.toml
	@PYTHON='$(PYTHON)' .ci/setup

$(venv)/built: $(venv)/ready $(inputs)
	$(say) "Building telegrad: C++ core, bindings, bundled UCX (one to three minutes the first time)"
	@$(configure_core)
	@$(tools) $(venv)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps \
	  --config-settings=build-dir=build/py --config-settings=cmake.define.TELEGRAD_BUILT="$(CURDIR)/build/core" \
	  --config-settings=editable.mode=redirect -e .
	@touch $@
