# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The environment is made once; its stamp is newer than the files that describe it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types floors unit proof test-cuda test-oldest clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## train a small Llama on this machine's own Python sources, in about a minute
	$(BIN)/shoal train

test: lint types floors unit  ## everything that must hold before a change lands

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(STAMP)
	$(BIN)/mypy

floors: $(STAMP)
	$(BIN)/lint-imports --no-cache

unit: $(STAMP)
	$(BIN)/python -m pytest

proof: $(STAMP)  ## the long matrices (hours are allowed), resumable; results land in docs/proof/
	$(BIN)/python -m tests.proof.kills

test-cuda:  ## one GPU, no network: the machine's own torch and Python, without the environment
	PYTHONPATH=src $(PYTHON) -m pytest tests/cuda -p no:cacheprovider --override-ini addopts= -q

test-oldest:  ## the oldest torch that README names
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check torch==2.11.0 --editable '.[dev]'
	.venv-oldest/bin/python -m pytest tests/worlds tests/trainer

clean:
	rm -rf $(VENV) .venv-oldest runs build src/*.egg-info
