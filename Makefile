# `make demo` and `make test` need Python 3.11 or newer, gcc and make; everything else comes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LAUNCHER := kserve/client/_launcher.abi3.so

.PHONY: demo launcher test test-fast lint format type bench size clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[daemon,cuda13,extension,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Optional: without a C compiler or Python's headers this says so, and launches take the road in pure Python.
launcher: $(LAUNCHER)

$(LAUNCHER): kserve/client/_launcher.c hatch_build.py | $(STAMP)
	$(BIN)/python hatch_build.py

test: $(STAMP) launcher
	$(BIN)/python -m pytest

test-fast: $(STAMP)
	$(BIN)/python -m pytest -m 'not toolchain and not slow'

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files --cached --others --exclude-standard '*.c' '*.cpp' '*.cu' '*.cuh' '*.h')

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $$(git ls-files --cached --others --exclude-standard '*.c' '*.cpp' '*.cu' '*.cuh' '*.h')

type: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

size:
	@git ls-files 'kserve/*.py' | xargs wc -l | sort -n

clean:
	-$(BIN)/python -m kserve down
	rm -rf $(VENV) $(LAUNCHER) cache/store .mypy_cache .ruff_cache .pytest_cache
