# Each target does its own set-up, once: a fresh machine needs `make test` or `make demo` and nothing before it.
# Python 3.11 or newer; another interpreter by `make PYTHON=python3.12 ...`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv-peers

.DEFAULT_GOAL := help
.PHONY: help setup check test test-all test-learns demo bench peers

help:
	@echo "make setup     virtual environment and dependencies, once"
	@echo "make check     lint, format, types"
	@echo "make test      tests, bar the slow ones and those for a GPU"
	@echo "make test-all  tests, bar those for a GPU"
	@echo "make test-learns  every algorithm on a toy, with a table of what it reached"
	@echo "make demo      a tool-using agent learns: SFT, then GRPO, minutes on a laptop"
	@echo "make bench     speed and memory; against TRL too after make peers"

setup: $(READY)

$(READY): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gymtune needs Python 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[dev]'
	@touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(READY)
	$(BIN)/pytest -q -m "not slow and not gpu"

test-all: $(READY)
	$(BIN)/pytest -q -m "not gpu"

test-learns: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -s tests/learns

demo: $(READY)
	$(BIN)/python benchmarks/demo.py

bench: $(READY)
	$(BIN)/python benchmarks/bench.py --json runs/bench.json \
		$(if $(wildcard $(PEERS)/.ready),--peer-python $(PEERS)/bin/python)

peers: $(PEERS)/.ready

$(PEERS)/.ready: .ci/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch 'trl==1.16.*'
	@touch $@
