# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types suite docs fuzz setup clean

demo: $(READY)
	@$(BIN)/python -m allgrad demo

test: lint types suite

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

suite: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

docs: $(READY)
	$(BIN)/python docs/generate.py

# Random programs on ranks against one process: make fuzz MINUTES=30
MINUTES ?= 5
fuzz: $(READY)
	$(BIN)/python tests/fuzz --minutes $(MINUTES)

setup: $(READY)

# torch first: with 2.13.0 in place nothing else pulls another build of it.
$(READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(READY)

clean:
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
