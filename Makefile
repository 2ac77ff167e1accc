# Needs python3 (3.10 or newer) and make; everything else is installed into .venv from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)

# One computing thread a process: tests start several ranks on one machine.
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test exhaustive matrix lint format bench bench-gpu soak docs clean
help:
	@echo "make demo | test | exhaustive | matrix | lint | format | bench | bench-gpu | soak | docs | clean"

venv: $(STAMP)

# torch first, by its pinned version, so that a failed download is not mistaken for anything else.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "shardwise needs Python 3.10 or newer, found " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) "$(TORCH)"
	@echo "installing shardwise[dev,hf,clients] into $(VENV)"
	@$(PIP) -e ".[dev,hf,clients]"
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "installing shardwise[docs] into $(VENV)"
	@$(PIP) -e ".[docs]"
	@touch $@

demo: $(STAMP)
	$(BIN)/shardwise run --nproc 2 examples/pretrain_gpt.py --config examples/pretrain_gpt.json

# Two processes, each with a pool of ranks of its own: ranks often wait for one another, and leave cores to the others.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --durations=20 -n 2 --dist worksteal

# Also the cases that `make test` leaves out of large products (tests/sampling.py).
exhaustive: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --durations=20 -n 2 --dist worksteal --exhaustive

# Every layout of a checkpoint into every other, with every optimizer (a part of it is in `make test`); the result goes
# to bench/results.
matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint.matrix

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Numbers, machine and versions go to bench/results/; plots, the README's table and docs/numbers.md are made of them.
# BENCH_PYTHON: interpreter of the measured programs, for example of an environment that has DeepSpeed too.
# BENCH_FLAGS: for example --quick, or --only step_time,memory.
BENCH_PYTHON ?= $(BIN)/python
bench: $(STAMP)
	$(BIN)/python bench/run.py --python $(BENCH_PYTHON) $(BENCH_FLAGS)

bench-gpu: $(STAMP)
	$(BIN)/python bench/one_gpu.py $(BENCH_FLAGS)
	$(BIN)/python bench/table.py README.md docs/numbers.md docs/convergence.md

# 100 ranks killed while saving and 100 while training; `make test` has ten of each. About a quarter of an hour.
SOAK_FLAGS ?= --kills 100
soak: $(STAMP)
	$(BIN)/python bench/soak.py $(SOAK_FLAGS)

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
