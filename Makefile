# Needs make and Python 3.11 or newer; everything else goes into .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check

DATA   ?=
LIMIT  ?=
OUT    ?= out/demo
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all trainers ray check format bench clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## serve a small reward model, train a policy against it (DATA=FILE.jsonl[.gz]: score your own lines)
	$(BIN)/guerdon demo --out $(OUT) $(if $(DATA),--data "$(DATA)") $(if $(LIMIT),--limit $(LIMIT))

test: $(VENV)/.dev  ## the quick tests
	$(BIN)/python -m pytest -q -m "not slow" $(ARGS)

test-all: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest -q $(ARGS)

trainers: $(VENV)/.dev  ## try the real trainers, each in an environment of its own (gigabytes, once)
	$(BIN)/python tests/trainers/environments.py --missing
	$(BIN)/python -m pytest -q tests/trainers $(ARGS)

ray: $(VENV)/.dev  ## install Ray too (300 MB, once), and try the service as a Ray Serve deployment
	$(PIP) install -c constraints.txt -e '.[dev,ray]'
	$(BIN)/python -m pytest -q tests/deploy $(ARGS)

check: $(VENV)/.dev  ## format, lint, types, and who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layout.py

format: $(VENV)/.dev  ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## measure against other servers (ARGS="..." are passed on)
	$(BIN)/python benchmarks/serve.py $(ARGS)

clean:  ## remove .venv and everything that was made
	rm -rf $(VENV) .venvs out build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the virtual environment: one folder, a stamp for what is in it -----------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "guerdon needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing guerdon and what it needs into $(VENV) (some minutes, once)"
	$(PIP) install -c constraints.txt -e '.[actor]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing guerdon and what its tests need into $(VENV) (some minutes, once)"
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(VENV)/.demo $@
