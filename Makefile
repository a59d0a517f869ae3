# Two commands on a fresh machine: `make train` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check clean

train: .venv/installed
	$(BIN)/python -m raytrain_bert.train

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv runs
