# Two commands do everything on a fresh machine with Python 3.10 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test lint format clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# The same wheels a GPU user gets: torch from the registry is the CUDA build and runs on a CPU too, DALI runs its
# CPU operators without a driver. The stamp is written last, so a broken install is tried again.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "fastsuncet needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	@echo "installing torch, DALI and the rest into $(VENV): about 6.5 GB, a few minutes ..."
	$(BIN)/python -m pip install -qq -c constraints.txt -e ".[dev]"
	@# Exact color in one operator, the same pixels in less time: a few seconds of a C++ compiler, and no loss without.
	@$(BIN)/python -m pipelines.dali.plugin || true
	@touch $(READY)

demo: $(READY)  ## train SimCLR and SimCLR + SuNCEt on real digits, under 5 minutes on two cores
	$(BIN)/fastsuncet demo

test: $(READY)  ## the whole test suite, CPU only
	$(BIN)/python -m pytest

lint: $(READY)  ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
