# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The environment is made once; its stamp is newer than the files that describe it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROOF_STAMP := .venv-proof/.installed
DOCS_STAMP := .venv-docs/.installed
PYODIDE := build/pyodide/package/pyodide.js
KIT_PYTHON ?= 3.12
# What is imported is compiled then, and kept: compiling every file of torch and transformers took 49 of 79 s.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable
COMPILED := import torch._dynamo, torch._inductor.compile_fx, torch.distributed.fsdp, transformers.modeling_utils
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo guards test lint types floors lanes worlds endings commands parallel unit test-sim proof pictures quick proof-env docs docs-open wheel cuda-kit test-cuda test-gpus test-versions clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) '.[dev]'
	touch $(STAMP)

# The heavy extras live beside it: nothing but `make proof` needs them.
$(PROOF_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-proof
	.venv-proof/bin/python $(INSTALL) '.[dev,proof]'
	touch $(PROOF_STAMP)

proof-env: $(PROOF_STAMP)

# Flower pins much of what others need newer, so `make proof PART=flower` has an environment of its own.
.venv-flower/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-flower
	.venv-flower/bin/python $(INSTALL) '.[digits,federated]'
	touch $@

# The site is built without torch: what its extra names, and what `shoal simulate` and `plan` import.
DOCS_NEEDS := import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*p["optional-dependencies"]["docs"], *(d for d in p["dependencies"] if d.startswith(("msgspec", "typer", "rich"))), sep="\n")

$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -c '$(DOCS_NEEDS)' > .venv-docs/needs.txt
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --requirement .venv-docs/needs.txt
	touch $(DOCS_STAMP)

# The simulator in the pages. Without npm or network the site is built all the same, and its buttons say so.
$(PYODIDE):
	-mkdir -p build/pyodide && cd build/pyodide && npm pack --silent pyodide@0.28.3 && tar xzmf pyodide-0.28.3.tgz

docs: $(DOCS_STAMP) $(PYODIDE)  ## the site, in build/site: every number and output on its pages compared with its source
	rm -rf build/site
	.venv-docs/bin/python -m sphinx -n -W --keep-going -q -c website -d build/doctrees docs build/site
	.venv-docs/bin/python -m sphinx -n -W --keep-going -q -c website -t zh -d build/doctrees-zh docs/zh build/site/zh

docs-open: docs  ## the site at http://127.0.0.1:8010, on this machine alone
	$(PYTHON) -m http.server 8010 --bind 127.0.0.1 --directory build/site

demo: $(STAMP)  ## train a small Llama on this machine's own Python sources, then compare layouts
	$(BIN)/shoal train
	$(BIN)/shoal compare

test: lint floors lanes  ## everything that must hold before a change lands

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples website
	$(BIN)/ruff format --check src tests benchmarks examples website

types: $(STAMP)
	$(BIN)/mypy

floors: $(STAMP)
	$(BIN)/lint-imports --no-cache

# Four lanes on two cores, the longest first: each waits for processes and deadlines about a third of its time.
COMMANDS := tests/cli tests/cuda tests/fabric tests/islands tests/launch tests/moving tests/trainer
ENDINGS := $(addprefix tests/worlds/,faults islands machines resumes)

lanes: $(STAMP)
	rm -rf build/test-times  # how long each file takes: python tests/file_times.py
	$(BIN)/python -c "$(COMPILED)"  # else four lanes would compile them at the same time
	$(MAKE) --jobs=4 worlds endings commands parallel unit test-sim types

worlds: $(STAMP)
	$(BIN)/python -m pytest tests/worlds $(ENDINGS:%=--ignore=%)

endings: $(STAMP)
	$(BIN)/python -m pytest $(ENDINGS)

commands: $(STAMP)
	$(BIN)/python -m pytest $(COMMANDS)

parallel: $(STAMP)
	$(BIN)/python -m pytest tests/parallel

unit: $(STAMP)
	$(BIN)/python -m pytest $(COMMANDS:%=--ignore=%) --ignore=tests/worlds --ignore=tests/parallel --ignore=tests/simgpu

test-sim: $(STAMP)  ## simulated CUDA devices: planted device bugs, and a loop of one's own beside the CPU
	$(BIN)/python -m pytest tests/simgpu

proof: $(STAMP)  ## the long matrices (hours are allowed), resumable; one part: make proof PART=faults
	$(BIN)/python tests/proof/run.py $(PART)

pictures: $(STAMP)  ## docs/pictures/*.svg, from the runs committed there; make test compares their data
	$(BIN)/python tests/pictures.py

guards: $(STAMP)  ## what watches the steps of a run: its cost, its bytes, what for, the tests that fail without it
	$(BIN)/python tests/proof/guards.py

quick: $(STAMP)  ## one room in under 80 CPU seconds: make quick ROOM=trainer
	$(BIN)/python tests/quick.py $(ROOM)

wheel: $(STAMP)  ## what a user installs, in build/dist/
	rm -rf build/lib  # setuptools packs what an earlier build left there, deleted modules too
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist .

test-versions: wheel  ## oldest and newest torch and Python that are claimed; results: proof/results/versions.json
	$(BIN)/python tests/proof/versions.py

cuda-kit: $(STAMP)  ## wheels for a GPU machine without network, into .cuda-kit/ (a few MiB)
	rm -rf build/lib .cuda-kit
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir .cuda-kit .
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(KIT_PYTHON) \
	  --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux_2_28_x86_64 --dest .cuda-kit msgspec

# On the machine's own torch and Python, without the environment and without network. OUT=folder: the
# result goes there, after every part, for a machine that gives one folder back. PATIENCE=2: a busy machine,
# twice the time for each part and for all.
test-cuda:  ## one GPU, at most 9 minutes; result: build/cuda.json. SHOAL_TEST_DEVICE=cpu: small, on the CPU
	$(PYTHON) tests/cuda/run.py $(if $(PARTS),--parts "$(PARTS)") $(if $(OUT),--out $(OUT)/cuda.json) $(if $(PATIENCE),--patience $(PATIENCE))

test-gpus:  ## 2 to 8 GPUs of one machine, at most 10 minutes; result: build/gpus.json, for proof/results/
	$(PYTHON) tests/cuda/run.py --on several $(if $(PARTS),--parts "$(PARTS)") $(if $(OUT),--out $(OUT)/gpus.json) $(if $(PATIENCE),--patience $(PATIENCE))

clean:
	rm -rf $(VENV) .venv-proof .venv-docs .venv-flower runs compare build .cuda-kit src/*.egg-info
