# Two commands do everything on a fresh machine with Python 3.10 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DOCS := $(VENV)/ready-docs

.PHONY: demo test test-fast mutants results docs docs-serve lint format pins clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# These are the wheels of a GPU machine: the CUDA build of torch also runs on a CPU, and DALI runs its CPU operators without
# a driver. The stamp is written last, so that a broken install is tried again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "fastsuncet needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	@echo "installing torch, DALI and the rest into $(VENV): about 6.5 GB, a few minutes ..."
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@# Optional: the view operator makes the same pixels in less time. It takes ten seconds of a C++ compiler.
	@$(BIN)/python -m pipelines.dali.view_operator || true
	@touch $(READY)

demo: $(READY)  ## train SimCLR, SimCLR + SuNCEt and the labels alone on real digits, in minutes on two cores
	$(BIN)/fastsuncet demo

# One thread for each worker: most tests are small, and torch's own threads would compete for the cores. Three workers on
# two cores: a quarter of their time they wait for processes that they started. Each takes up to 3 GB, so eight at most.
WORKERS := $(shell n=$$(($$(env -u OMP_NUM_THREADS nproc) * 3 / 2)); echo $$((n < 8 ? n : 8)))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: $(READY)  ## the whole test suite, CPU only
	$(PYTEST) --durations=20

test-fast: $(READY)  ## the tests for an edit-run cycle: no training, no extra processes, under a minute
	$(PYTEST) -m "not slow" --durations=10

mutants: $(READY)  ## break a copy of the code in many places, one at a time, and name the test that notices: ten minutes
	$(BIN)/python tools/mutations.py

results: $(READY)  ## recompute tables and figures of README.md and RESULTS.md
	@for points in docs/results/*/points.csv; do \
	  $(BIN)/python tools/results.py show $$points --figure $$(dirname $$points)/accuracy.png || exit 1; echo; done
	@$(BIN)/python tools/results.py runs docs/results/clothing-paws/accuracies.csv
	@$(BIN)/python tools/results.py arms docs/results/suggestions/accuracies.csv
	@$(BIN)/python tools/results.py strengths docs/results/linear-strength/accuracies.csv
	@$(BIN)/python tools/results.py demo docs/demo

$(DOCS): $(READY)
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[docs]"
	@touch $(DOCS)

docs: $(DOCS)  ## build the documentation into site/; a broken link or a missing name fails
	$(BIN)/mkdocs build

docs-serve: $(DOCS)  ## show the documentation at localhost:8000 and follow every edit
	$(BIN)/mkdocs serve

lint: $(READY)  ## ruff (check and format) and pyright
	$(BIN)/ruff check .
	@# Text without an encoding is read in that of the locale. The tests write and read ASCII.
	$(BIN)/ruff check --preview --select PLW1514 fastsuncet pipelines tools
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)  ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One exact set of versions for every machine and interpreter, by uv; an interpreter that a release no longer supports gets the
# newest release that does. The image's file has the hashes of all files of these versions.
COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.10 --no-annotate --custom-compile-command "make pins"
pins: $(READY)  ## write constraints.txt and tools/docker_requirements.txt; with UPGRADE=--upgrade the newest versions
	$(BIN)/python -m pip install -qq uv
	$(COMPILE) $(UPGRADE) pyproject.toml --extra dev --extra bench --extra energy -o constraints.txt
	$(COMPILE) --generate-hashes -c constraints.txt pyproject.toml $(foreach each,dali-cu12 demo energy plots tensorboard,--extra $(each)) \
	  -o tools/docker_requirements.txt

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
