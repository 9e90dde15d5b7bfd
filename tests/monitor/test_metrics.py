"""Metrics: the catalogue, the gauges of the cluster, the counters of sends, and the commands for probes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from socket import create_connection
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from horsies import Horsies
from horsies.cli import health
from horsies.cli.session import READING, Session
from horsies.config.postgres import PostgresConfig
from horsies.db.statement import Script
from horsies.findings import Finding, Level
from horsies.monitor import metrics
from horsies.monitor.diagnose import slow
from horsies.monitor.diagnose.attention import findings_of
from horsies.monitor.diagnose.doctor import SLOW_IDS, CheckReport
from horsies.monitor.diagnose.slow import SCRAPED_SECONDS, VIEWED_SECONDS, SlowChecks
from horsies.monitor.measures import BOUNDS, NAMES_MAX, Series, Slot
from horsies.monitor.metrics import (
    CATALOGUE,
    CLUSTER,
    NOT_CHECKED,
    RED_CODES,
    UP,
    WORKER,
    ClusterGauges,
    Metric,
    MissingExtraError,
    drain_seconds,
    exposition,
    finding_samples,
    require_prometheus,
)
from horsies.monitoring import count_sends
from horsies.result import Ok
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from horsies.tasks.outcome import Outcome
from horsies.worker.probe import (
    CONNECTIONS_MAX,
    AddressError,
    Answer,
    Vitals,
    judge_liveness,
    judge_readiness,
    serving,
    worker_routes,
    worker_values,
)
from horsies.worker.tally import Tally
from tests.support.applications import NOWHERE, app_at
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.keys import add_keyed
from tests.support.locks import locked
from tests.support.pool import claimed
from tests.support.rows import add_attempt, add_task, add_worker, ago
from tests.support.wait import wait_until

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
VITALS = Vitals(
    awake_by=100.0,
    has_started=True,
    is_stopping=False,
    is_connected=True,
    is_receiving=True,
    reconnects=2,
    unrecorded=3,
    children_busy=1,
    children_idle=1,
    children_other=0,
    children_started=5,
    child_pids=[],
    child_deaths={"signal 9 (SIGKILL)": 1},
)


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def assert_in_catalogue(text: str, catalogue: tuple[Metric, ...]) -> None:
    """Every name of the catalogue is in the text with its labels, and nothing else is."""
    found = families(text)
    assert set(found) == {metric.name.removesuffix("_total") for metric in catalogue}
    for metric in catalogue:
        family = found[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample
            if metric.values:
                assert sample.labels[metric.labels[-1]] in metric.values


def test_names_follow_the_rules_of_prometheus() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert metric.name.startswith("horsies_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.text.endswith(".")
        assert not {"task_id", "worker_id", "host", "error_code"} & set(metric.labels)


def collect(app: Horsies, gauges: ClusterGauges) -> list[str]:
    """Collect the gauges and the findings, as the dashboard does, and return the statements."""
    asked: list[str] = []
    perform = partial(app.get_broker().perform, BrokerErrorCode.MONITORING_QUERY_FAILED)
    assert perform(noted(gauges.script(), asked)).is_ok()
    if gauges.wants_details():
        assert perform(noted(gauges.details_script(), asked)).is_ok()
    return asked


def test_the_gauges_of_the_cluster_are_those_of_the_catalogue(
    app: Horsies, connection: Database
) -> None:
    connection.execute(
        "INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, seen_at)"
        " VALUES ('w', 1, 'host', 1, 4, '{default}', now())"
    )
    connection.execute(
        "INSERT INTO horsies_worker_states (worker_id, snapshot_at, hostname, pid, processes, queues,"
        " tasks_running, tasks_claimed, max_claim_batch, max_claim_per_worker, queue_max_concurrency,"
        " worker_started_at) VALUES ('w', now(), 'host', 1, 4, '{default}', 0, 0, 0, 0,"
        " '{\"default\": 3}', now())"
    )
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha, enqueued_at)"
        " SELECT gen_random_uuid(), 'work', 'default', 'sha', now() - n * interval '1 minute'"
        " FROM generate_series(-1, 3) AS n"
    )
    add_keyed(connection, "acme")
    gauges = ClusterGauges("public")
    collect(app, gauges)
    body, content_type = exposition(gauges.samples())
    assert content_type.startswith("text/plain")
    text = body.decode()
    assert_in_catalogue(text, CLUSTER)
    assert 'horsies_queue_tasks{queue="default",state="due"} 5.0' in text
    assert 'horsies_queue_tasks{queue="default",state="delayed"} 1.0' in text
    assert 'horsies_queue_drain_seconds{queue="default"} +Inf' in text
    assert 'horsies_queue_children{queue="default",state="idle"} 4.0' in text
    assert 'horsies_queue_cap{queue="default"} 3.0' in text
    assert "horsies_up 1.0" in text
    (oldest,) = families(text)["horsies_queue_oldest_due_seconds"].samples
    assert 180 <= oldest.value < 240
    assert 'horsies_table_bytes{table="horsies_tasks"}' in text


def noted(script: Script[Any], asked: list[str]) -> Script[Any]:
    """The same script; the names of its statements are added to the list."""
    rows: Any = None
    try:
        while True:
            step = script.send(rows)
            asked.append(step[0].name)
            rows = yield step
    except StopIteration as finished:
        return finished.value


def test_scrapers_share_a_collection_and_findings_and_sizes_are_read_rarely(app: Horsies) -> None:
    now = [1_000.0]
    gauges = ClusterGauges("public", clock=lambda: now[0])
    assert gauges.fresh() is None
    asked = collect(app, gauges)
    assert {"read_table_sizes", "find_failing_tasks"} <= set(asked)
    repeated = {name for name in asked if asked.count(name) > 1}
    assert repeated == {"list_blocked"}, "the checks share the rows of the gauges"
    now[0] += 4.9
    assert gauges.fresh() is not None
    now[0] += 0.2
    assert gauges.fresh() is None
    assert not {"read_table_sizes", "find_failing_tasks"} & set(collect(app, gauges))
    now[0] += 15
    asked = collect(app, gauges)
    assert "find_failing_tasks" in asked
    assert "read_table_sizes" not in asked
    now[0] += 60
    assert "read_table_sizes" in collect(app, gauges)
    gauges.note_failure()
    assert [(one.name, one.value) for one in gauges.fresh() or ()][-1] == ("horsies_up", 0.0)
    assert "horsies_findings" not in {one.name for one in gauges.samples()}


def test_sizes_that_cannot_be_read_hide_the_findings_of_one_look(app: Horsies) -> None:
    now = [1_000.0]
    gauges = ClusterGauges("public", clock=lambda: now[0])
    perform = partial(app.get_broker().perform, BrokerErrorCode.MONITORING_QUERY_FAILED)
    assert perform(gauges.script()).is_ok()
    assert perform(cut_off(gauges.details_script(), "read_table_sizes")).is_ok()
    gauges.note_no_details()
    assert NOT_CHECKED in {one.labels for one in gauges.samples()}
    now[0] += 15
    asked = collect(app, gauges)
    assert "find_failing_tasks" in asked
    assert "read_table_sizes" not in asked
    assert NOT_CHECKED not in {one.labels for one in gauges.samples()}


def cut_off(script: Script[None], last: str) -> Script[None]:
    """The same script; it ends with a statement that does not answer."""
    rows: Any = None
    while (step := script.send(rows))[0].name != last:
        rows = yield step


def test_findings_that_cannot_be_read_are_a_red_finding_and_hide_no_gauge(app: Horsies) -> None:
    gauges = ClusterGauges("public")
    collect(app, gauges)
    gauges.note_no_details()
    samples = gauges.samples()
    assert [one.labels for one in samples if one.name == "horsies_findings"] == [NOT_CHECKED]
    assert samples[-1] == UP


def test_slow_checks_that_cannot_run_are_a_red_finding_until_they_run(app: Horsies) -> None:
    checks = SlowChecks()
    with closing(app_at(NOWHERE)) as unreachable:
        for _ in range(2):
            assert checks.is_due(SCRAPED_SECONDS)
            checks.refresh(unreachable.get_broker())
    (found,) = findings_of(checks.reports)
    assert (found.code, found.level) == NOT_CHECKED
    assert found.sentence.startswith("The slow checks could not run: ")
    assert checks.is_due(SCRAPED_SECONDS)
    checks.refresh(app.get_broker())
    assert {one.id for one in checks.reports} == SLOW_IDS
    assert not checks.is_due(SCRAPED_SECONDS)


@pytest.mark.parametrize(
    ("level", "due"),
    [(Level.YELLOW, [False, False, True]), (Level.UNKNOWN, [True, False, False])],
    ids=["complete", "incomplete"],
)
def test_slow_checks_that_took_long_rest_unless_one_could_not_run(
    app: Horsies, monkeypatch: pytest.MonkeyPatch, level: Level, due: list[bool]
) -> None:
    clock = iter([0.0, 0.0, 4.0, 150.0, 199.0, 201.0])
    found = (Finding("CRASHES", "Task leak ended its process.", level),)
    monkeypatch.setattr(slow, "monotonic", lambda: next(clock))
    monkeypatch.setattr(slow, "run_doctor", lambda *_: Ok([CheckReport("crashes", "", found)]))
    checks = SlowChecks()
    assert checks.is_due(VIEWED_SECONDS)
    checks.refresh(app.get_broker())
    assert [checks.is_due(VIEWED_SECONDS) for _ in range(3)] == due


def test_findings_are_counted_by_code_and_level() -> None:
    found = [
        Finding("TASK_UNKNOWN", "a", Level.RED),
        Finding("TASK_UNKNOWN", "b", Level.RED),
        Finding("LOCKS", "c", Level.RED),
        Finding("TASK_RETRYING", "d", Level.YELLOW),
    ]
    counts = {one.labels: one.value for one in finding_samples(found) if one.value}
    assert counts == {
        ("TASK_UNKNOWN", "red"): 2,
        ("LOCKS", "red"): 1,
        ("TASK_RETRYING", "yellow"): 1,
    }
    assert {one.labels for one in finding_samples([])} == {(code, "red") for code in RED_CODES}


def test_a_lost_worker_is_counted_once_and_the_counter_never_falls(
    app: Horsies, connection: Database
) -> None:
    gauges = ClusterGauges("public")

    def lost() -> float:
        collect(app, gauges)
        (total,) = [one for one in gauges.samples() if one.name == "horsies_workers_lost_total"]
        return total.value

    assert lost() == 0
    first = add_worker(connection, stopped_at=ago(9), was_lost=True)
    add_worker(connection, stopped_at=ago(9))
    assert (lost(), lost()) == (1, 1)
    add_worker(connection, stopped_at=ago(1), was_lost=True)
    assert lost() == 2
    connection.execute("DELETE FROM horsies_workers WHERE worker_id = %s", (first,))
    assert lost() == 2


def series(done: int, retried: int) -> Series:
    slot = Slot(NOON - timedelta(minutes=5), done=done, retried=retried)
    return Series(timedelta(minutes=1), NOON, [slot], slot)


def test_queues_beyond_the_limit_share_a_label(
    app: Horsies, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "QUEUES_MAX", 2)
    for name in ("a", "b", "c", "other"):
        add_task(connection, queue_name=name, enqueued_at=ago(5))
    connection.execute("INSERT INTO horsies_queues VALUES ('c', now())")
    add_worker(connection, queues=["a", "c", "other"], processes=3)
    gauges = ClusterGauges("public")
    collect(app, gauges)
    found = families(exposition(gauges.samples())[0].decode())
    tasks = {
        sample.labels["queue"]: sample.value
        for sample in found["horsies_queue_tasks"].samples
        if sample.labels["state"] == "due"
    }
    assert tasks == {"a": 1, "b": 1, "other": 2}
    children = {
        sample.labels["queue"]: sample.value
        for sample in found["horsies_queue_children"].samples
        if sample.labels["state"] == "idle"
    }
    assert children == {"a": 3, "b": 0, "other": 3}
    paused = {one.labels["queue"]: one.value for one in found["horsies_queue_paused"].samples}
    assert paused["other"] == 1


def test_the_time_to_drain_a_queue_follows_from_the_rate_of_ended_tasks() -> None:
    assert drain_seconds(0, None) == 0.0
    assert drain_seconds(10, None) == float("inf")
    assert drain_seconds(10, series(0, 7)) == float("inf"), "a retried task comes back"
    assert drain_seconds(600, series(300, 7)) == 600.0


def get(port: int, path: str, accept: str = "") -> tuple[int, str]:
    request = Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_server_of_the_gauges_has_slow_findings_and_ends_a_scrape_of_a_locked_table(
    connection: Database, process_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "COLLECT_SECONDS", 0.0)
    monkeypatch.setattr(health, "PATIENCE_SECONDS", 60.0)
    for _ in range(10):
        task = add_task(connection, status="FAILED", failed_at=ago(5))
        add_attempt(connection, task, outcome="WORKER_FAILURE", error_code="WORKER_CRASHED")
    limits = READING._replace(lock_ms=50)
    config = PostgresConfig(database_url=process_url)
    broker = PostgresBroker(config, role="operator", migrates=False, limits=limits)
    routes = health._routes([Session(broker, None)])
    with closing(broker), serving("127.0.0.1", 0, routes) as port:
        assert 'horsies_findings{code="CRASHES",level="red"} 1.0' in get(port, "/metrics")[1]
        with locked(process_url, "horsies_tasks"):
            status, text = get(port, "/metrics")
            assert get(port, "/readyz") == (503, "the database cannot be read\n")
        assert (status, "\nhorsies_up 0.0\n" in text) == (200, True)
        assert get(port, "/readyz") == (200, "ready\n")


def busy_tally(names: int) -> Tally:
    tally = Tally()
    for number in range(names):
        task = claimed(f"{number}", 1)._replace(
            task_name=f"task{number}", enqueued_at="2026-01-31 12:00:00+00"
        )
        tally.note_starts([task], behind=number % 2)
        tally.note_ends([(Outcome.completed(task, "1"), task, 0.3)])
    tally.note_turn(0.002, 7)
    return tally


def test_a_worker_serves_its_part_of_the_catalogue() -> None:
    with serving("127.0.0.1", 0, worker_routes(lambda: VITALS, busy_tally(3))) as port:
        status, text = get(port, "/metrics")
        assert status == 200
        assert_in_catalogue(text, WORKER)
        attempts = families(text)["horsies_attempts"].samples
        assert sum(one.value for one in attempts if one.labels["outcome"] == "completed") == 3
        handed = families(text)["horsies_tasks_handed_out"].samples
        assert {one.labels["way"]: one.value for one in handed} == {"alone": 2, "window": 1}
        ran = families(text)["horsies_attempt_duration_seconds"].samples
        bounds = {one.labels["le"] for one in ran if "le" in one.labels}
        assert bounds == {*map(str, BOUNDS), "+Inf"}
        waited = families(text)["horsies_wait_seconds"].samples
        assert [one.value for one in waited if one.name.endswith("_count")] == [3.0]
        _, text = get(port, "/metrics", "application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
        assert get(port, "/livez")[0] == 503, "the clock has run on since the vitals were made"
        assert get(port, "/readyz") == (200, "ready\n")
        assert get(port, "/")[0] == 404


def test_names_of_tasks_beyond_the_limit_share_a_label() -> None:
    with serving("127.0.0.1", 0, worker_routes(lambda: VITALS, busy_tally(300))) as port:
        _, text = get(port, "/metrics")
    attempts = families(text)["horsies_attempts"].samples
    names = {one.labels["task"] for one in attempts}
    assert len(names) == NAMES_MAX + 1
    others = [one.value for one in attempts if one.labels["task"] == "other"]
    assert sum(others) == 300 - NAMES_MAX


def test_a_task_may_be_called_like_the_label_of_the_others() -> None:
    tally = busy_tally(NAMES_MAX - 1)
    tasks = [claimed("x", 1)._replace(task_name=name) for name in ("other", "one too many")]
    tally.note_ends([(Outcome.completed(task, "1"), task, 0.3) for task in tasks])
    body, _ = exposition(worker_values(VITALS, tally))
    text = body.decode()
    line = 'horsies_attempts_total{outcome="completed",queue="default",task="other"} 2.0'
    assert text.count('{outcome="completed",queue="default",task="other"}') == 1
    assert line in text


@pytest.mark.parametrize(
    ("late_seconds", "changes", "status"),
    [
        (10.0, {}, 200),
        (31.0, {}, 503),
        (31.0, {"has_started": False}, 200),
        (10.0, {"is_connected": False}, 200),
    ],
)
def test_a_worker_is_alive_while_its_loop_runs(
    late_seconds: float, changes: dict[str, Any], status: int
) -> None:
    vitals = replace(VITALS, **changes)
    assert judge_liveness(vitals, vitals.awake_by + late_seconds).status == status


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "ready"),
        ({"has_started": False}, "the worker is starting"),
        ({"is_stopping": True}, "the worker is shutting down"),
        ({"is_connected": False}, "the database is not connected"),
        ({"children_busy": 0, "children_idle": 0}, "no child process is ready"),
    ],
)
def test_a_worker_is_ready_while_it_claims(changes: dict[str, Any], sentence: str) -> None:
    expected = Answer.line(sentence, ok=sentence == "ready")
    assert judge_readiness(replace(VITALS, **changes)) == expected


@pytest.mark.parametrize("is_scheduling", [True, False])
def test_a_worker_with_a_scheduler_is_ready_while_the_scheduler_is_connected(
    is_scheduling: bool,
) -> None:
    ready = worker_routes(lambda: VITALS, Tally(), lambda: is_scheduling)["/readyz"]("")
    text = "ready" if is_scheduling else "the scheduler is not connected to the database"
    assert ready == Answer.line(text, ok=is_scheduling)


def test_slow_clients_do_not_use_up_the_threads_of_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("horsies.worker.probe._Handler.timeout", 60.0)
    with ExitStack() as stack:
        port = stack.enter_context(serving("127.0.0.1", 0, worker_routes(lambda: VITALS, Tally())))
        before = threading.active_count()
        for _ in range(CONNECTIONS_MAX + 20):
            slow = stack.enter_context(create_connection(("127.0.0.1", port)))
            slow.sendall(b"GET /readyz HTTP/1.0\r\nslow: ")
            assert get(port, "/readyz") == (200, "ready\n")
        wait_until(lambda: threading.active_count() <= before + CONNECTIONS_MAX, what="threads")


def test_a_port_in_use_is_one_sentence() -> None:
    with (
        serving("127.0.0.1", 0, {}) as port,
        pytest.raises(AddressError, match=f"127.0.0.1:{port}: Address already in use"),
        serving("127.0.0.1", port, {}),
    ):
        pass


def test_without_the_extra_a_sentence_names_it(
    monkeypatch: pytest.MonkeyPatch, horsies: Run
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"pip install '/path/to/horsies\[metrics\]'"):
        require_prometheus()
    refused = horsies("metrics")
    assert refused.code == 1
    assert "horsies metrics: Metrics need the package prometheus-client" in refused.err
    refused = horsies("worker", "tests.support.apps.programs:app", "--metrics-port", "0")
    assert refused.code == 1


def test_sends_are_counted_in_the_registry_of_the_application(app: Horsies) -> None:
    registry = prometheus_client.CollectorRegistry()
    count_sends(app, registry)

    @app.task("add")
    def add(a: int, b: int) -> int:
        return a + b

    add.enqueue(1, 2)
    add.send_many([add.bind(1, 2), add.bind(3, 4)]).unwrap()
    for _ in range(2):
        add.with_options(idempotency_key="once").enqueue(1, 2)
    assert add.send("x", 2).is_err()  # type: ignore[arg-type]

    def count(result: str) -> float | None:
        labels = {"queue": "default", "task": "add", "result": result}
        return registry.get_sample_value("horsies_sends_total", labels)

    assert (count("stored"), count("duplicate"), count("failed")) == (4.0, 1.0, 1.0)
    labels = {"queue": "default", "task": "add"}
    assert registry.get_sample_value("horsies_send_duration_seconds_count", labels) == 5.0


def test_health_fails_when_no_worker_answers(horsies: Run, connection: Database) -> None:
    found = horsies("health")
    assert (found.code, found.err) == (1, "error: No worker runs.\n")
    connection.execute(
        "INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, name)"
        " VALUES ('w', 1, 'host', 1, 4, '{default}', 'mailer')"
    )
    found = horsies("health", "--worker", "mailer", "--timeout", "0.1", "--json")
    assert found.code == 1
    document = json.loads(found.out)
    (worker,) = document["workers"]
    assert (document["ok"], worker["id"], worker["ping_ms"]) == (False, "w", None)
    assert "None of 1 worker(s) named 'mailer' answered." in found.err
    assert "No worker named 'other' runs." in horsies("health", "--worker", "other").err


def test_commands_and_applications_do_not_import_the_client_library() -> None:
    program = "import sys, horsies.cli.main, horsies.monitoring; print('prometheus_client' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
