# Every target sets up what it needs: `make test` on a bare machine with Python 3 is enough.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
DEV := $(VENV)/.stamp-dev
DOCS := $(VENV)/.stamp-docs
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --quiet

.DEFAULT_GOAL := help
.PHONY: help setup check format lint types test test-fast test-slow browser any-browser api docs \
	bench demo clean

help:
	@echo "make setup   virtual environment, package in editable mode, development extras"
	@echo "make check   format, lint, types, layers, fast tests: what every change must pass"
	@echo "make test    all CPU tests, including slow ones"
	@echo "make browser install Debian's chromium where there is no browser, for the report's tests"
	@echo "make format  rewrite the code in the house format"
	@echo "make api     rewrite the snapshot of the public names, tests/public_api.txt"
	@echo "make docs    build the site into site/, fail on a broken link"
	@echo "make bench   time the loss against cross-entropy and entmax"
	@echo "make demo    train five losses on synthetic identities and write a report"
	@echo "make clean   remove caches and built files; .venv stays"

setup: $(DEV)

# The stamps rerun pip only when the requirements changed; an existing environment is completed.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	@touch $@

$(DOCS): $(DEV)
	$(PIP) --editable '.[docs]'
	@touch $@

check: lint types test-fast

lint: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(DEV)
	$(BIN)/mypy

# `test` is made of two runs so that `make check test` runs the fast ones once.
test: test-fast test-slow

test-fast: $(DEV) any-browser
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(DEV)
	$(PYTEST) -m "slow and not gpu"

# Tests of the report's page need a browser and are skipped, with a reason, where none can be had.
browser:
	@.ci/browser

any-browser:
	@.ci/browser || true

api: $(DEV)
	$(BIN)/python tests/test_public_api.py

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(DEV)
	$(BIN)/qmargin bench loss

demo: $(DEV)
	$(BIN)/qmargin demo

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
