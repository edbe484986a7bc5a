# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The environment is made once; its stamp is newer than the files that describe it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types floors unit proof test-cuda clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## train a small Llama on this machine's own Python sources, then compare layouts
	$(BIN)/shoal train
	$(BIN)/shoal compare

test: lint floors  ## everything that must hold before a change lands
	$(MAKE) --jobs=2 types unit

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
	$(BIN)/python tests/proof/kills.py
	$(BIN)/python tests/proof/equality.py
	$(BIN)/python tests/proof/formats.py
	$(BIN)/python tests/proof/any_module.py
	$(BIN)/python tests/proof/long_context.py
	$(BIN)/python tests/worlds/pipe_makespan.py
	$(BIN)/python -m pytest -m proof

test-cuda:  ## one GPU, no network: the machine's own torch and Python, without the environment
	PYTHONPATH=src $(PYTHON) -m pytest tests/cuda -p no:cacheprovider --override-ini addopts= -q

clean:
	rm -rf $(VENV) runs compare build src/*.egg-info
