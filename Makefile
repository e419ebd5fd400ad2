# `make demo` and `make test` work in a bare clone: they need python3 (>= 3.10), make and a package registry.
#
#   PYTHON=python3.12   the interpreter to build .venv from
#   VENV=dir            where the environment is; `VENV=` (empty) makes none and uses PYTHON as it is, with
#                       the packages it has: for a machine with its own torch, or without a registry
#   ARGS="..."          options for the script behind demo, bench, test, planted, gpu-test and hunt

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
OLDEST_TORCH ?= 2.11.0
OLDEST_VENV ?= .venv-oldest
NEWEST_TORCH ?= 2.15.0
NEWEST_VENV ?= .venv-newest
DOCS_VENV ?= .venv-docs

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY := in-place
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

PIP := -m pip --disable-pip-version-check --no-input install -qq
HAS_GPU := $(shell command -v nvidia-smi 2>/dev/null)
BENCH_SCALE := $(if $(HAS_GPU),full,tiny)

# one process for each core, and the tests of a file together, where pytest-xdist is installed
PARALLEL := from importlib.util import find_spec; print("-n auto --dist loadfile" if find_spec("xdist") else "")

.PHONY: help demo test test-rest test-packages test-all planted test-oldest test-newest missing-names faults lint docs gpu-test hunt bench clean in-place

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## train the digits example with PyGraph in a Lightning Trainer and print its report
	$(PY) examples/lightning_digits.py $(ARGS)

test: lint ## formatting, lint, types, the contract, and the tests of single parts: six minutes on two cores
	$(PY) -m pytest -m "not slow" tests/contract tests/unit $$($(PY) -c '$(PARALLEL)') $(ARGS)

test-rest: $(READY) ## the other tests that are not slow (GPU tests skip themselves without a GPU)
	$(PY) -m pytest -m "not slow" --ignore tests/contract --ignore tests/unit $$($(PY) -c '$(PARALLEL)') $(ARGS)

test-packages: $(READY) ## trainings with PEFT, TRL, sentence-transformers, PyTorch Geometric and torchmetrics, which it installs
	$(PY) $(PIP) -c constraints.txt -e ".[packages]"
	$(PY) -m pytest tests/contract/test_packages.py tests/unit/test_docs.py $$($(PY) -c '$(PARALLEL)') $(ARGS)

test-all: test test-rest test-packages ## every check: `make test`, `make test-rest`, `make test-packages`, then the slow tests
	$(PY) -m pytest -m slow $$($(PY) -c '$(PARALLEL)') $(ARGS)

planted: $(READY) ## plant faults in the library, and list the tests that pass although they promise to notice
	$(PY) -m tests.planted $$($(PY) -c '$(PARALLEL)') $(ARGS)

lint: $(READY) ## formatting, lint and types only
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

test-oldest: $(OLDEST_VENV)/.installed ## the contract and the wheel on the oldest torch that is supported, in an environment of its own
	$(OLDEST_VENV)/bin/python -m pytest -m "not slow" tests/contract tests/unit/test_packaging.py \
		$$($(OLDEST_VENV)/bin/python -c '$(PARALLEL)') $(ARGS)

test-newest: $(NEWEST_VENV)/.installed ## the contract, the wheel and a loop of each front end on the newest torch that is supported, in an environment of its own
	$(NEWEST_VENV)/bin/python -m pytest -m "not slow" tests/contract tests/unit/test_packaging.py tests/test_front_ends.py \
		tests/test_phases_apart.py $$($(NEWEST_VENV)/bin/python -c '$(PARALLEL)') $(ARGS)

faults: $(READY) ## let functions of the library raise in turn: each training has to survive (ARGS="--front lightning --all")
	$(PY) -m tests.planted_exceptions $(ARGS)

missing-names: $(READY) ## train without each private name of torch in turn, which the library has to survive (20 minutes)
	$(PY) -m tests.missing_names $(ARGS)

docs: $(DOCS_VENV)/.installed ## the site of the documents, in build/site (fails on a warning)
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

gpu-test: $(READY) ## the contract with CUDA graphs, and the tests that need a GPU
	PYGRAPH_CONTRACT_DEVICE=cuda $(PY) -m pytest -m "not slow" tests/contract --ignore tests/contract/test_two_ranks.py $(ARGS)
	$(PY) -m pytest tests/gpu $(ARGS)

hunt: $(READY) ## thousands of generated training runs, with and without the library (ARGS="--cases 5000 --seed 1")
	$(PY) -m tests.generator.hunt $(ARGS)

bench: $(READY) ## training steps in a stock Lightning Trainer in five ways (without a GPU: tiny models, no timing claim)
	$(PY) -m benchmarks.lightning_step --scale $(BENCH_SCALE) $(ARGS)

clean: ## remove caches and build outputs (the environment stays: rm -r .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache lightning_logs
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Anything that installs depends on this file: nothing is installed again until a version changes.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed; set PYTHON=")'
	@echo "installing into $(VENV) (torch is large: the first time takes a while)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP) -c constraints.txt -e ".[dev,examples]"
ifneq ($(HAS_GPU),)
	@$(VENV)/bin/python -c 'import torch; torch.cuda.is_available() or print("note: there is an NVIDIA GPU, but torch", torch.__version__, "cannot use it: see Installing in README.md")'
endif
	@touch $@

$(DOCS_VENV)/.installed: docs/requirements.txt
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python $(PIP) -r docs/requirements.txt
	@touch $@

$(OLDEST_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	@grep -vE '^(torch|setuptools)==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	@$(OLDEST_VENV)/bin/python $(PIP) -c $(OLDEST_VENV)/constraints.txt -e ".[dev]" "torch==$(OLDEST_TORCH)"
	@touch $@

# the newest torch may be newer than pip is configured to install
$(NEWEST_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	@grep -vE '^(torch|setuptools)==' constraints.txt > $(NEWEST_VENV)/constraints.txt
	@PIP_CONFIG_FILE=/dev/null $(NEWEST_VENV)/bin/python $(PIP) -c $(NEWEST_VENV)/constraints.txt \
		-e ".[lightning,accelerate,transformers]" pytest pytest-timeout pytest-xdist build "setuptools>=77" "torch==$(NEWEST_TORCH)"
	@touch $@

in-place:
	@$(PYTHON) $(PIP) --no-deps --no-build-isolation -e .
