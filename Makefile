# make demo: analyse a sample and write the report; make test: all that CI runs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SAMPLE := sample_traces/run_28_mfu

.PHONY: demo test format clean

demo: $(VENV)/.installed
	$(BIN)/traceaudit analyze $(SAMPLE) -o report.html --json result.json --force
	@echo "Open report.html in a browser."

test: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) report.html result.json .mypy_cache .pytest_cache .ruff_cache .hypothesis
