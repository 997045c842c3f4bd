# Every target does its own set-up; `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 2
READY := $(VENV)/.ready
CHAOS_MINUTES ?= 60
SOURCES := schemas/src producer/src consumer/src deploy/local tests

.DEFAULT_GOAL := help
.PHONY: help demo test unit chaos check fuzz bench format broker clean

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: $(READY) ## run 8 training ranks through a real Kafka and verify every dump
	PYTHONPATH=deploy/local $(BIN)/python -m rollcast_demo

test: $(READY) ## run all tests: unit, real broker, real ranks
	$(BIN)/python -m pytest

unit: $(READY) ## run the tests without I/O, in about a minute
	$(BIN)/python -m pytest tests/unit

chaos: $(READY) ## kill daemons and broker in ever new ways for CHAOS_MINUTES, an hour by default
	PYTHONPATH=tests $(BIN)/python -m chaos $(CHAOS_MINUTES)

check: $(READY) ## lint, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: export PYTHONPATH := tests:deploy/local
bench: $(READY) ## measure; prints ratios and writes benchmarks/results/
	$(BIN)/python -W ignore benchmarks/restore.py
	$(BIN)/python -W ignore benchmarks/stall.py
	$(BIN)/python -W ignore benchmarks/interference.py
	$(BIN)/python -W ignore benchmarks/end_to_end.py --on memory
	$(BIN)/python -W ignore benchmarks/end_to_end.py --on disk
	$(BIN)/python -W ignore benchmarks/size.py
	$(BIN)/python -W ignore benchmarks/growth.py
	$(BIN)/python -W ignore benchmarks/pages.py
	$(BIN)/python -W ignore benchmarks/memory.py

format: $(READY) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(READY) ## search for inputs that break the readers, MINUTES=2 for each of 5 targets
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'atheris>=3'
	for target in records frames values slots streams; do \
	  PYTHONPATH=tests $(BIN)/python -W ignore tests/fuzz/coverage_guided.py $$target fuzz-output/$$target \
	    -max_total_time=$$((60 * $(MINUTES))) || exit 1; \
	done

broker: $(READY) ## run a local Kafka until Ctrl-C
	$(BIN)/rollcast broker

clean: ## remove the environment and what tools left
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-output fuzz-output chaos-output

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "rollcast needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing into $(VENV), once: up to 6 GB, most of it torch, 2 to 4 minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[producer,consumer,broker,dev]'
	@touch $@
