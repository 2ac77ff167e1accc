# Needs python3 (3.10 or newer) and make; everything else is installed into .venv from constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# What `make demo` needs, what everything else needs, and what `make docs` needs besides.
DEMO_STAMP := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
# Builds of torch without CUDA, several GB smaller, are taken where this index can be reached; TORCH_INDEX= for others.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)

# One computing thread a process: tests start several ranks on one machine.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes; where Python may not keep what it has compiled, each compiles shardwise anew.
export PYTHONDONTWRITEBYTECODE :=
# Tests and tools import the drop-in's package from the checkout; the drop-in itself (`import deepspeed`) is not installed.
export PYTHONPATH := $(CURDIR)/dropin/src$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help venv demo demo-again offload test test-gpu rehearse-gpu test-machines machines exhaustive matrix versions lint format guard size hops bench bench-gpu soak hostile docs clean
help:
	@echo "make demo | demo-again | offload | test | test-gpu | rehearse-gpu | test-machines | machines | exhaustive | matrix | versions | lint | format | guard | size | hops | bench | bench-gpu | soak | hostile | docs | clean"

venv: $(STAMP)

# torch first, by its pinned version, so that a failed download is not mistaken for anything else.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "shardwise needs Python 3.10 or newer, found " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV) (once; some minutes)"
	@index=$$($(PYTHON) -c 'import urllib.request as u; u.urlopen("$(TORCH_INDEX)/torch/", timeout=10)' 2>/dev/null \
		&& echo --extra-index-url $(TORCH_INDEX)); $(PIP) $$index "$(TORCH)"
	@echo "installing shardwise and the demo's packages into $(VENV)"
	@$(PIP) --upgrade "pip>=25.1"
	@$(PIP) -e . --group demo
	@touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "installing packages of development and clients into $(VENV)"
	@$(PIP) -e . --group demo --group dev --group clients
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "installing the packages of the site into $(VENV)"
	@$(PIP) -e . --group docs
	@touch $@

# Ctrl-C saves and stops, and the next `make demo` goes on from there; `make demo-again` begins anew.
demo: $(DEMO_STAMP)
	@echo "pretraining a GPT of 11 million parameters on two processes of the CPU, 3 to 10 minutes on two cores"
	@$(BIN)/shardwise run --nproc 2 --grace 60 examples/pretrain_gpt.py

demo-again:
	rm -rf demo_out
	@$(MAKE) --no-print-directory demo

# Three processes, each with a pool of ranks of its own: ranks often wait for one another, and leave cores to the others.
# After so many failures the run ends: if ranks hang, each test takes until its limit.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --progress --durations=20 -n 3 --dist worksteal --maxfail 20

# A model whose state is eight times as large as the device trains; what was planned, measured and allowed is printed.
offload: $(DEMO_STAMP)
	@$(BIN)/shardwise run --nproc 1 examples/offload.py

# The tests that need a CUDA device; `make test` skips them where there is none. On a machine without a network nothing is
# installed: `make test-gpu BIN=/opt/venv/bin STAMP=` takes the Python of a folder, which has to have torch; what else it
# lacks may be on PYTHONPATH. One process runs about 300 cases: where a command may not take that long, GPU_TESTS names
# files, for example GPU_TESTS="tests/gpu/test_[a-o]*.py", and then [p-z]. A test that hangs is ended.
GPU_TESTS ?= tests/gpu
test-gpu: $(STAMP)
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python -m pytest -q --progress --durations=15 -p no:cacheprovider $(GPU_TESTS)

# The same tests on a stand-in for the device, on the CPU: what a device alone can tell is left out.
rehearse-gpu: $(STAMP)
	$(BIN)/python -m pytest -q --progress -p no:cacheprovider tests/gpu --rehearse

# Jobs on several machines, in network namespaces with an ssh server each: needs root, iproute2 and
# openssh-server; pdsh, openmpi-bin, mpich, slurmctld, slurmd and munge where they are installed.
test-machines: $(STAMP)
	$(BIN)/python -m pytest -q --progress --durations=10 -n 0 -p no:cacheprovider tests/machines

# Times and bytes of such machines, and 50 of them lost; the results go to bench/results. About twenty minutes.
machines: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.machines.measure $(MACHINES_FLAGS)

# Also the cases marked thorough, which `make test` leaves out. About an hour on two cores.
exhaustive: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --progress --durations=20 -n 3 --dist worksteal --exhaustive

# Every layout of a checkpoint into every other, with every optimizer, and of ranks that share tensors, sequences and
# experts (a part of it is in `make test`); the result goes to bench/results.
matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.checkpoint.matrix

# A fresh environment for each version of Python and torch, and the tests that meet torch most closely (noxfile.py).
versions: $(STAMP)
	$(BIN)/nox -s versions $(VERSIONS_FLAGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Compares losses, gradients and parameters of 62 settings, bit by bit, with those stored for this processor and torch; a
# change that is to change bits stores new ones with GUARD_FLAGS=--record. One to two minutes.
guard: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.guard $(GUARD_FLAGS)

# Lines of code, docstrings and tests by package; SIZE_FLAGS: for example --files 20.
size:
	@$(PYTHON) bench/size.py $(SIZE_FLAGS)

# Callables, files and moves between files of five events, with FSDP2 beside them; HOPS_FLAGS: for example --list step.
hops: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python bench/hops.py $(HOPS_FLAGS)

# Numbers, machine and versions go to bench/results/; plots and the tables of the README and the docs are made of them.
# BENCH_PYTHON: interpreter of the measured programs, for example of an environment that has DeepSpeed too.
# BENCH_FLAGS: for example --quick, or --only step_time,memory.
BENCH_PYTHON ?= $(BIN)/python
bench: $(STAMP)
	$(BIN)/python bench/run.py --python $(BENCH_PYTHON) $(BENCH_FLAGS)

# One CUDA device; --only, --minutes and --missing choose parts (bench/run.py). A machine's own interpreter: STAMP= BIN=DIR.
bench-gpu: $(STAMP)
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python bench/run.py --device cuda $(BENCH_FLAGS)

# 100 ranks killed while saving and 100 while training; `make test` has two of each. About a quarter of an hour.
SOAK_FLAGS ?= --kills 100
soak: $(STAMP)
	$(BIN)/python -m tests.slow.soak $(SOAK_FLAGS)

# Trains while other processes call every port, and compares bits.
HOSTILE_FLAGS ?= --minutes 20
hostile: $(STAMP)
	$(BIN)/python -m tests.slow.hostile $(HOSTILE_FLAGS)

# The page of plans of some models is made again if the planner's or the engine's code has changed, which takes minutes.
PLAN_PAGE := .cache/plan.html
PLAN_MODELS ?= bloom-560m llama-7b llama-70b
$(PLAN_PAGE): $(DOCS_STAMP) $(wildcard src/shardwise/plan/* src/shardwise/engine/*.py src/shardwise/memory/*.py)
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(BIN)/shardwise plan $(PLAN_MODELS) --page $@

docs: $(DOCS_STAMP) $(PLAN_PAGE)
	$(BIN)/zensical build --strict
	cp $(PLAN_PAGE) site/plan.html

clean:
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
