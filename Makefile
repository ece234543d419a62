# `make help` lists what there is. Everything runs in .venv, which `make setup` makes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev hooks demo test test-all lint types format bench report docs fuzz chaos transformers-tests clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: .venv/.core ## Make .venv with the package and what it needs to run

setup-dev: .venv/.dev ## Add what tests, lint and types need

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.core: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable .
	@touch $@

.venv/.dev: .venv/.core
	$(PIP) --editable '.[dev]'
	@touch $@

.venv/.docs: .venv/.core
	$(PIP) --editable '.[docs]'
	@touch $@

hooks: setup-dev ## Check style before every commit
	$(BIN)/pre-commit install

demo: setup ## Train TRA, with and without a margin, RoPE and FoT on a small task, and see who survives length (about 4 minutes)
	$(BIN)/tra demo

test: setup-dev lint types ## Lint, types and the quick tests
	$(BIN)/python -m pytest -m 'not slow and not timing and not gpu' -n 2 --dist worksteal

test-all: setup-dev lint types ## All of it, also what is slow: kills, compilers, training runs, further cases
	$(BIN)/python -m pytest -m 'not timing and not gpu' -n 2 --dist worksteal
	$(BIN)/python -m pytest -m timing

fuzz: setup-dev ## Hostile input, long: 25,000 command lines, configs, folders and archives (FUZZ_EXAMPLES=…, FUZZ_SEED=…)
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-25000} $(BIN)/python -m pytest tests/fuzz -n 2 --dist worksteal

chaos: setup-dev ## Kills, full disks and several writers, for 18 minutes
	$(BIN)/python -m tests.chaos --jobs 2 --minutes 18

lint: setup-dev ## Style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup-dev ## Types
	$(BIN)/mypy

format: setup-dev ## Put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Speed and memory of the operator on this machine
	$(BIN)/tra bench op

report: setup ## Rebuild tables and figures under results/ from the committed runs
	$(BIN)/tra report results/demo/tra results/demo/tra-margin-2 results/demo/rope results/demo/forgetting --out results/demo
	$(BIN)/tra report results/flipflop/tra results/flipflop/rope --out results/flipflop
	$(BIN)/tra report results/rivals/*/ --out results/rivals
	$(BIN)/tra report results/language/*/ --out results/language
	for task in copy induct instruct; do $(BIN)/tra report results/lengths/$$task/*/ --out results/lengths/$$task || exit 1; done
	$(BIN)/python -m benchmarks.speed_figure results/bench/op-h200.json --trained results/bench/op-language.json
	$(BIN)/tra report --index results
	$(BIN)/python -m benchmarks.tables

docs: .venv/.docs ## Build the site into build/docs: warnings are errors, nothing from the network
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet -b html docs build/docs

transformers-tests: setup-dev ## Fetch transformers' own test mixins, and run them on our classes (six minutes)
	version=$$($(BIN)/python -c 'import transformers; print(transformers.__version__)') && mkdir -p .cache && \
	$(BIN)/python -m pip download -q --no-deps --no-binary :all: transformers==$$version -d .cache && \
	tar -xzf .cache/transformers-$$version.tar.gz -C .cache
	HF_HUB_OFFLINE=1 TRANSFORMERS_REPORT=$${TRANSFORMERS_REPORT:-.cache/transformers-tests.json} $(BIN)/python -m pytest tests/hub/transformers_suite/test_mixins.py -n 2 --dist worksteal

clean: ## Remove .venv and caches
	rm -rf .venv build .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis demo
