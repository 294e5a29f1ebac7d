PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A process for each core, each with one thread: they would wait for one another otherwise.
# Files begin in the order of tests/conftest.py, those that take longest first: none of these runs alone at the end.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Tests start many processes: what these import is compiled once.
export PYTHONDONTWRITEBYTECODE :=

CPP := $(shell find coserve -name '*.cpp' -o -name '*.h')

.PHONY: setup demo test test-quick test-amx test-triton test-long test-every test-browser test-cluster test-clients fuzz storm storm-simulated storm-clustered storm-poisoned storm-ranks check lint docs wheel changelog format hooks clean

setup: $(VENV)/.ready  ## One environment, in .venv

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# TENSOR_PARALLEL=2: on two ranks, processes that hold the model together.
demo: setup  ## Serve and fine-tune at once, in three minutes; leaves demo-report/report.html
	$(BIN)/coserve demo $(if $(TENSOR_PARALLEL),--tensor-parallel $(TENSOR_PARALLEL))

# COVERAGE=1 prints how much of the package these tests ran; they take about twice as long.
test: setup  ## Every test that this machine can run but the long ones, warnings as errors
	$(PYTEST) -m "not long and not browser and not cluster and not clients" $(if $(COVERAGE),--cov=coserve --cov-report=term)

# Without servers: what a change to the engine, a policy or a model breaks first.
test-quick: setup  ## Plain and torch tests alone, without the long ones
	$(PYTEST) -m "not long" tests/plain tests/torch

# What is compiled for AMX, on a processor with AVX-512's bfloat16 alone; its sum has a changed header compiled anew. It is
# for bfloat16 and int8: tests that name neither run what `make test` runs.
AMX := $(CURDIR)/tests/processors/emulated_amx.h
AMX_TESTS = $(sort $(shell grep -lE 'bfloat16|int8' tests/torch/test_*.py))
test-amx: setup  ## Models and kernels as with AMX, which tests/processors has in software; for processors with AVX-512
	@if grep -qw amx_bf16 /proc/cpuinfo || ! grep -qw avx512_bf16 /proc/cpuinfo; then \
		echo "skipped: this processor has AMX, or no AVX-512 for bfloat16"; \
	else \
		COSERVE_CXXFLAGS="-include $(AMX) -DAMX_SUM=$$(cksum < $(AMX) | cut -d' ' -f1)" $(PYTEST) -m "not long" $(AMX_TESTS); \
	fi

# Beside the environment, since PyTorch's builds for GPUs bring one of their own.
TRITON := $(CURDIR)/$(VENV)/triton-3.9.0
$(TRITON): | setup
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.9.0

# In a matrix unit, the sums of a row don't depend on its place in a tile. The interpreter's are NumPy's, by OpenBLAS, whose
# kernels for AVX2 add up the last rows of a tile in another order; those for Prescott don't.
test-triton: setup $(TRITON)  ## The kernels of GPUs, interpreted on the CPU, and compiled for GPUs that need not be there
	OPENBLAS_CORETYPE=Prescott TRITON_INTERPRET=1 COSERVE_KERNELS=triton PYTHONPATH=$(TRITON) $(PYTEST) --dist worksteal tests/interpreted tests/torch/test_kernels.py

test-long: setup  ## What starts server after server, trains for long, or goes through every combination
	$(PYTEST) -m long

test-every: setup  ## Every combination of settings, of which `make test-long` tries a part that covers any two or three of them
	COSERVE_EVERY_COMBINATION=1 $(PYTEST) -m "long or not long" $(sort $(shell grep -lE 'import .*covering' tests/torch/test_*.py))

test-browser: setup  ## The page in a real browser; skipped where there is no chromium
	$(PYTEST) -m browser tests/browser

# Beside the environment's own packages; without it, the tests are skipped.
RAY := $(VENV)/.ray
$(RAY): $(VENV)/.ready
	-$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cluster]' && touch $@

# Kills of engines, actors, machines and the front, one kind after the other.
KILLS ?= 4
test-cluster: setup | $(RAY)  ## One server on a real Ray cluster of three nodes; installs Ray, and is skipped where it cannot
	COSERVE_CLUSTER_KILLS=$(KILLS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster $(sort $(shell grep -rl --include='*.py' mark.cluster tests)) -s

# ALL=1 also tries those that take minutes; see docs/clients.md, whose table this writes.
test-clients: setup  ## Real clients, in Python and Node, each in an environment of its own
	COSERVE_ALL_CLIENTS=$(ALL) $(BIN)/python -m pytest -m clients -rs tests/clients
	$(BIN)/python scripts/clients_table.py

# How many calls in all, give or take a tenth; .ci/run makes a few hundred of the same. The last line counts calls, statuses
# and deaths.
CALLS ?= 10000
fuzz: setup  ## Call every route with right and wrong values and grammars; fails on an answer of 500 or more, on none, or on a death
	COSERVE_FUZZ_CALLS=$(CALLS) $(BIN)/python -m pytest --capture=sys tests/server/test_schema.py tests/server/test_grammar_fuzz.py

# Minutes of each kind, and the seed to begin with; the tests run some seconds of the first.
MINUTES ?= 10
SEED ?= 0
STREAMS ?= 512
storm: setup  ## Operations and faults, in virtual time and on real processes; a failure prints what repeats it
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target storm-simulated storm-clustered storm-poisoned storm-ranks
	PYTHONPATH=tests $(BIN)/python -m storm real --minutes $(MINUTES) --seed $(SEED) --streams $(STREAMS)

# A core each, as far as there are that many.
storm-simulated storm-clustered storm-poisoned storm-ranks: storm-%: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m storm $* --minutes $(MINUTES) --first-seed $(SEED)

lint: setup  ## Format, lint, spelling and types of the package, tests, scripts and experiments
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

wheel: setup  ## A wheel in dist/ with compiled CPU kernels for each kind of x86-64; without them, `pip wheel .`
	COSERVE_WHEEL_KERNELS=1 $(BIN)/python -m hatchling build -t wheel

docs: setup  ## The documentation as a site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# What needs more than this machine (hours of load), and every combination (test-every), has a target of its own; all of
# this should take 40 minutes at most.
check: setup  ## All of it; .ci/run runs this
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint docs
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-amx
	$(MAKE) --no-print-directory test-triton
	$(MAKE) --no-print-directory test-long
	$(MAKE) --no-print-directory test-browser
	$(MAKE) --no-print-directory test-cluster
	$(MAKE) --no-print-directory test-clients

changelog: setup  ## The next release's notes, from changelog.d; DRAFT=1 only prints them
	$(BIN)/towncrier build $(if $(DRAFT),--draft,--yes) --version $$($(BIN)/python -c "from coserve.version import VERSION; print(VERSION)")

format: setup  ## Bring the code into format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

hooks: setup  ## Run format and lint before each commit, types before each push
	$(BIN)/pre-commit install

clean:  ## Remove what setup and the tests made
	rm -rf $(VENV) demo-report site .mypy_cache .ruff_cache .hypothesis .coverage*
