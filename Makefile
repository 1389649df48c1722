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
	bench bench-loss bench-metrics bench-data bench-features bench-protocols bench-trials \
	bench-synthetic \
	bench-train bench-head bench-head-gpu bench-sizes demo clean

help:
	@echo "make setup   virtual environment, package in editable mode, development extras"
	@echo "make check   format, lint, spelling, types, fast tests: what every change must pass"
	@echo "make test    all CPU tests, including slow ones"
	@echo "make browser install Debian's chromium where there is no browser, for the report's tests"
	@echo "make format  rewrite the code in the house format"
	@echo "make api     rewrite the snapshot of the public names, tests/public_api.txt"
	@echo "make docs    build the site into site/, fail on a broken link"
	@echo "make bench   list the benchmarks; make bench-loss, bench-head, ... measure, write docs/benchmarks/"
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
	$(BIN)/codespell

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
	@echo "site/index.html; its search needs a server: python3 -m http.server --directory site"

# Benchmarks at the size of their pages, which they rewrite; ARGS has further options.
BENCH := $(BIN)/python -m benchmarks
PAGES := docs/benchmarks
RESULTS := build/bench

bench: $(DEV)
	$(BENCH) --help

bench-loss: $(DEV)
	$(BENCH) loss --page $(PAGES)/loss.md $(ARGS)

bench-metrics: $(DEV)
	$(BENCH) metrics --page $(PAGES)/metrics.md $(ARGS)

bench-data bench-features bench-protocols bench-trials bench-synthetic: bench-%: $(DEV)
	$(BENCH) $* --page $(PAGES)/data.md $(ARGS)

bench-train: $(DEV)
	$(BENCH) train --device cuda --set data.batch_size=512 --page $(PAGES)/training.md $(ARGS)

bench-scaling: $(DEV)
	$(BENCH) scaling --check --page $(PAGES)/scaling.md
	$(BENCH) scaling --page $(PAGES)/scaling.md $(ARGS)

bench-head: $(DEV)
	mkdir -p $(RESULTS)
	$(BENCH) head --device cpu --paths sparse,chunked,dense --settings several \
		--parts products,paths,settings --repeats 5 --json $(RESULTS)/head-cpu.json $(ARGS)
	$(BENCH) head-page --out $(PAGES)/head-cpu.md $(RESULTS)/head-cpu.json

bench-head-gpu: $(DEV)
	mkdir -p $(RESULTS)/gpu
	PATH=$(abspath $(BIN)):$$PATH benchmarks/gpu.sh $(RESULTS)/gpu "$$(git rev-parse --short HEAD)" \
		head head-bf16 head-bf16-settings growth end-to-end reference
	$(BENCH) head-page --out $(PAGES)/head.md $(RESULTS)/gpu/head-*.json

bench-sizes: $(DEV)
	mkdir -p $(RESULTS)
	$(BENCH) sizes --device cuda --json $(RESULTS)/sizes.json --page $(PAGES)/sizes.md \
		--figure $(PAGES)/sizes.svg --readme README.md $(ARGS)

# Other subjects have no page: make bench-packing, bench-precision, ...
bench-%: $(DEV)
	$(BENCH) $* $(ARGS)

demo: $(DEV)
	$(BIN)/qmargin demo

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
