# make train: install into .venv and run the main job on its defaults.   make train ARGS="train.steps=20"
# make test:  install what the tests need and run all of them.           make test PYTEST_ARGS="-m 'not slow'"
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

.PHONY: train test lint bench clean

train: $(VENV)/.installed
	$(BIN)/launch train $(ARGS)

test: lint tools
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed
	$(BIN)/launch run -- jobs/bench.py

# the tests that count bytes on a wire make hosts of their own; without root they skip, and say so
.PHONY: tools
tools:
	@if [ "$$(id -u)" = 0 ] && ! command -v ip >/dev/null && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2; fi

$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "launcher needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install -q -c constraints.txt torch numpy
	$(BIN)/pip install -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
