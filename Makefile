PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/.train  ## the whole chain on real digits, in minutes
	$(BIN)/vit-edge run pipelines/quickstart.yaml

test: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev  ## side-by-side measurements
	for script in benchmarks/*.py; do PYTHONPATH=. $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) dist build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[all]"
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@ $(VENV)/.train
