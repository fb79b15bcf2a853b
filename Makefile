# Everything runs in .venv, which `make install` makes; nothing else has to be prepared.
SHELL := bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := .cache/smollm2-135m-instruct
TYPES := .cache/types
TORCH := .cache/torch
CUDA := .cache/cuda
TORCH_PYTHON ?= python3.11

# Given on the command line: PYTHON picks the interpreter, ARGS goes to pytest or the program run,
# WORKERS is how many processes run tests. Most of their time is compiling, which takes one core.
PYTHON ?=
ARGS ?=
WORKERS ?= 2

# A virtual environment does not survive a move, so the stamp holds the folder it was made in.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): moved
endif

.PHONY: help install model compiler demo test test-all lint types format bench clean moved

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## Make .venv and install the package in it, with the development tools

$(STAMP): pyproject.toml
	@if [ "$$(cat $@ 2>/dev/null)" != '$(CURDIR)' ] || ! $(BIN)/python -c '' 2>/dev/null; then \
	  python=$$(PYTHON="$(PYTHON)" sh scripts/find_python.sh) && \
	  echo "Making $(VENV) with $$python" && "$$python" -m venv --clear $(VENV); \
	fi
	@rm -f $@
	@echo "Installing peagle-jax and what it needs; a minute or two the first time"
	@set -o pipefail; errors=$(VENV)/pip-errors.txt; \
	  $(BIN)/python -m pip install --disable-pip-version-check --no-input --retries 2 --progress-bar off \
	    --editable '.[dev]' 2>$$errors | awk ' \
	    /(Downloading|Using cached) .*MB\)/ {print $$1, $$2, $$(NF-1), $$NF; fflush()} \
	    /^Installing collected packages/ {print "Unpacking"; fflush()}' || \
	  { tail -n 20 $$errors >&2; exit 1; }
	@printf '%s' '$(CURDIR)' >$@
	@echo "Installed in $(VENV)"

model: install ## Fetch the demo's target model (93 MB) once
	@$(BIN)/python examples/fetch_smollm2.py $(MODEL)

demo: model ## Answer a prompt with and without the drafter, and compare
	@$(BIN)/python examples/demo.py $(ARGS)

compiler: $(CUDA)/.installed ## Fetch what compiles programs for GPUs without a GPU (170 MB) once

# Beside the environment, not in it: JAX's plugin looks for a driver wherever it is installed.
$(CUDA)/.installed: $(STAMP)
ifeq ($(shell uname -s),Linux)
	@echo "Fetching JAX's CUDA plugin and ptxas"
	@rm -rf $(CUDA)
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(CUDA) \
	    jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc
	@touch $@
endif

# XLA's optimisations of machine code take a third of the tests' time and change no result; test-all
# has them.
test: model compiler ## Run the tests, without the slow ones
	XLA_FLAGS=--xla_backend_optimization_level=0 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(ARGS)

test-all: model compiler ## Run all the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: install ## Check style and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# mypy cannot follow the mapping of convert/ to peagle_jax.convert, so it is shown the installed
# layout, made of links.
types: install ## Check the types
	@rm -rf $(TYPES)/peagle_jax && mkdir -p $(TYPES)/peagle_jax
	@ln -s '$(CURDIR)'/peagle_jax/* $(TYPES)/peagle_jax/
	@ln -s '$(CURDIR)/convert' $(TYPES)/peagle_jax/convert
	@ln -sfn '$(CURDIR)/examples' $(TYPES)/examples
	@ln -sfn '$(CURDIR)/benchmarks' $(TYPES)/benchmarks
	@set -o pipefail; cd $(TYPES) && '$(CURDIR)/$(BIN)/mypy' \
	  --config-file '$(CURDIR)/pyproject.toml' peagle_jax examples benchmarks | \
	  sed 's,^peagle_jax/convert/,convert/,'

format: install ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: model $(TORCH)/.installed ## Measure decoding speed against transformers and the memory bandwidth
	@$(BIN)/python benchmarks/decode.py --torch-python $(TORCH)/bin/python $(ARGS)

# What the benchmark compares with: transformers and CPU torch, in a Python of their own.
$(TORCH)/.installed:
	@$(TORCH_PYTHON) -m venv --clear $(TORCH) || \
	  { echo "No $(TORCH_PYTHON); name a Python that torch has a CPU build for: TORCH_PYTHON=..." >&2; exit 1; }
	@echo "Installing torch and transformers in $(TORCH)"
	@$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 transformers==5.24.0
	@touch $@

clean: ## Remove what was built and cached, the environment and the model included
	rm -rf $(VENV) .cache build dist *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
