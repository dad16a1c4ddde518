# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.demo-ready
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready

.PHONY: demo test lint types suite docs package fuzz setup clean

demo: $(DEMO_READY)
	@$(BIN)/python -m allgrad demo

test: lint types suite

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Tests start hundreds of processes: with bytecode kept, each starts sooner.
suite: export PYTHONDONTWRITEBYTECODE =
suite: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Writes the generated pages of docs/, and builds the site from them into site/, warnings being errors.
docs: $(DOCS_READY)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/: open site/index.html"

# The wheel and the sdist, each installed in an empty environment.
package: $(READY)
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python tools/check_package.py

# Random programs on ranks against one process: make fuzz MINUTES=30
MINUTES ?= 5
fuzz: $(READY)
	$(BIN)/python tests/fuzz --minutes $(MINUTES)

setup: $(READY)

# torch first: with 2.13.0 in place nothing else pulls another build of it.
$(DEMO_READY): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[cli,testing]"
	@touch $(DEMO_READY)

$(READY): $(DEMO_READY)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(READY)

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	@touch $(DOCS_READY)

clean:
	rm -rf $(VENV) dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
