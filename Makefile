PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A process for each core, each with one thread: they would wait for one another otherwise.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist loadfile

.PHONY: setup demo test check format clean

setup: $(VENV)/.ready  ## One environment, in .venv

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup  ## Serve and fine-tune at once, in three minutes; leaves demo-report/report.html
	$(BIN)/coserve demo

test: setup  ## Every test that this machine can run, warnings as errors
	$(PYTEST)

check: setup  ## Format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

format: setup  ## Bring the code into format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## Remove what setup and the tests made
	rm -rf $(VENV) demo-report .mypy_cache .ruff_cache .hypothesis
