# Each target does its own set-up, once: a fresh machine needs `make test` or `make demo` and nothing before it.
# Python 3.11 or newer; another interpreter by `make PYTHON=python3.12 ...`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv-peers
SGLANG := .sglang-env
SGLANG_PYTHON := $(or $(GYMTUNE_SGLANG_PYTHON),$(CURDIR)/$(SGLANG)/bin/python)

.DEFAULT_GOAL := help
.PHONY: help setup check test test-all test-learns test-sglang sglang-env demo bench peers

help:
	@echo "make setup     virtual environment and dependencies, once"
	@echo "make check     lint, format, types"
	@echo "make test      tests, bar the slow ones, those for a GPU and those of a real SGLang server"
	@echo "make test-all  tests, bar those for a GPU and those of a real SGLang server"
	@echo "make sglang-env  an environment with SGLang for a CPU (2.3 GB); GYMTUNE_SGLANG_PYTHON names one you have"
	@echo "make test-sglang  tests against a real SGLang server"
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
	$(BIN)/pytest -q -m "not slow and not gpu and not sglang"

test-all: $(READY)
	$(BIN)/pytest -q -m "not gpu and not sglang"

test-learns: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -s tests/learns

# Tests against a real server. Its environment is its own: SGLang pins other versions than ours.
test-sglang: $(READY) sglang-env
	GYMTUNE_SGLANG_PYTHON=$(SGLANG_PYTHON) OMP_NUM_THREADS=1 $(BIN)/pytest -q -m "sglang and not slow"

sglang-env: $(if $(GYMTUNE_SGLANG_PYTHON),,$(SGLANG)/.ready)
	@$(SGLANG_PYTHON) -c 'from importlib.metadata import version; print("SGLang", version("sglang"))'

# The shim lets SGLang run without AMX and without a GPU: tests/sglang/shim.
$(SGLANG)/.ready: tests/sglang/requirements-server.txt tests/sglang/requirements-server-nodeps.txt \
		$(wildcard tests/sglang/shim/*.py tests/sglang/shim/*.pth)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check -r tests/sglang/requirements-server.txt
	$(SGLANG)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/sglang/requirements-server-nodeps.txt
	cp -r tests/sglang/shim/. "$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

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
