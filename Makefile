# Needs only make, git and Python 3.11 to 3.13 with venv. `make setup` does the rest; every CI step is one of these targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# A folder of the current directory must never shadow an installed package.
export PYTHONSAFEPATH := 1

VENV := .venv
BIN := $(VENV)/bin
# Only compiles kernels: CUDA 12.9 is the last line that knows sm_70.
CUDA12_VENV := .venv-cuda12
# The first of these that runs and is a version we support; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
# Two processes: most tests wait for processes and servers of their own. Files stay whole, since some share a stack.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup setup-cuda12 demo check test sim bench up lock check-images format clean

help:  ## Show the targets.
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  \1\t/' | expand -t 18

setup: $(VENV)/.installed $(VENV)/.model  ## Create .venv, install the locked versions, fetch the default model.

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements/dev.lock pyproject.toml | $(VENV)/bin/python
	@echo "installing the locked requirements into $(VENV) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup-cuda12: $(CUDA12_VENV)/.installed  ## Create .venv-cuda12, where tests compile the kernels with CUDA 12.9 (sm_70).

$(CUDA12_VENV)/.installed: requirements/worker-cuda12.lock | $(VENV)/bin/python
	@echo "installing the locked requirements into $(CUDA12_VENV) ..."
	$(BIN)/python -m venv $(CUDA12_VENV)
	$(CUDA12_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(VENV)/.model: deploy/model_fetch.py $(VENV)/.installed
	$(BIN)/kvalet model fetch
	@touch $@

demo: setup  ## Hold one conversation that changes worker at every turn, and compare it with one that stayed.
	$(BIN)/kvalet demo

up: setup  ## Keep two servers, the gateway and two workers running in the foreground.
	$(BIN)/kvalet up

check: $(VENV)/.installed  ## Lint, format, types, import rules.
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup  ## The whole test suite.
	$(BIN)/python -m pytest $(PYTEST_ARGS)

sim: setup  ## The simulation tests alone.
	$(BIN)/python -m pytest tests/simulation

bench: setup  ## The benchmarks; results go to benchmarks/results/.
	$(BIN)/python -m benchmarks

format: $(VENV)/.installed  ## Sort imports and apply safe fixes.
	$(BIN)/ruff check --fix .

lock:  ## Resolve requirements/*.lock again.
	bash requirements/lock.sh

check-images: $(VENV)/.installed  ## Validate compose and Kubernetes files; run the images' install steps in a clean environment.
	$(BIN)/python -m deploy.check_images

clean:  ## Remove both environments and caches.
	rm -rf $(VENV) $(CUDA12_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
