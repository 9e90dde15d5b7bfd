"""Errors of the data, without children: one transaction per task after a refusal, and growing waits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, LiteralString, Protocol

import psycopg
import pytest
from psycopg import Connection
from psycopg.errors import lookup

from horsies.config.app import RecoveryConfig
from horsies.db import pipeline as pipeline_module
from horsies.db.errors import ErrorKind, describe_refusal, kind_of
from horsies.db.pipeline import Pipeline
from horsies.db.statements.blocked import list_blocked
from horsies.db.statements.turn import ClaimedTask, ClaimUnresolvable
from horsies.db.statements.workers import find_abandoned
from horsies.states import TaskStatus
from horsies.tasks.blocked import (
    ALIKE,
    LOCKED_SECONDS,
    LONGEST_LOCK_SECONDS,
    PATIENCE,
    Blocked,
    Change,
    Failures,
)
from horsies.tasks.outcome import Outcome
from horsies.tasks.recovery import (
    EXPIRY_BATCH,
    RECOVERY_BATCH,
    expire_pending,
    recover_found,
)
from horsies.worker.known_tasks import claim_unknown
from horsies.worker.ledger import TURN_CHARACTERS_MAX, Ledger, State
from horsies.worker.reaper import sweep
from horsies.worker.turn import (
    Claimer,
    TurnRequest,
    TurnResult,
    record_alone,
    release_unheld,
    take_turn,
)
from tests.support.keys import add_keyed
from tests.support.poison import DEFERRED, IMMEDIATE, SECRET, poisoned
from tests.support.pool import claimed
from tests.support.rows import add_task, ago, row_of

CLAIMER = Claimer("me", "host", ["default"], [None])
MEBIBYTES = 1024 * 1024
# More than a gibibyte in all, the largest value of PostgreSQL, with `make soak`.
LARGE_RESULTS = 66 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 12
POISONOUS = "NEW.task_name = 'poison'"
ENDED = {"status": "COMPLETED", "completed_at": ago(10 * 3600)}


class Poison(Protocol):
    def __call__(
        self, connection: Connection[Any], condition: LiteralString, *, state: str = "54000"
    ) -> AbstractContextManager[None]: ...


@pytest.fixture(params=[IMMEDIATE, DEFERRED], ids=["immediate", "deferred"])
def poison(request: pytest.FixtureRequest) -> Poison:
    """A trigger that refuses changes of certain rows, in the statement or at COMMIT."""

    def refuse(
        connection: Connection[Any], condition: LiteralString, *, state: str = "54000"
    ) -> AbstractContextManager[None]:
        return poisoned(connection, condition, state=state, trigger=request.param)

    return refuse


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def claim(pipeline: Pipeline, count: int) -> list[ClaimedTask]:
    request = TurnRequest(pids=list(range(1, count + 1)))
    claimed = list(take_turn(pipeline, CLAIMER, [], request).claimed)
    assert len(claimed) == count
    return claimed


def abandoned(connection: Connection[Any], name: str = "work") -> str:
    return add_task(
        connection,
        task_name=name,
        status="RUNNING",
        generation=1,
        claimed_by_worker_id="dead",
        claimed_at=ago(60),
    )


def statuses(connection: Connection[Any], name: str) -> set[str]:
    rows = connection.execute("SELECT status FROM horsies_tasks WHERE task_name = %s", (name,))
    return {row[0] for row in rows}


# The kinds of errors


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        (["08006", "53100", "40001", "40P01", "55P03", "57P01", "25006"], ErrorKind.TRANSIENT),
        (["28P01", "3D000", "3F000", "42501", "42P01", "42883", "26000"], ErrorKind.INSTALLATION),
        (["22023", "23505", "23514", "54000", "P0001", "XX000", "XX001", "58030"], ErrorKind.DATA),
    ],
)
def test_every_error_is_of_one_kind(states: list[str], kind: ErrorKind) -> None:
    for state in states:
        assert kind_of(lookup(state)("x")) is kind, state


def test_errors_of_the_client_have_a_kind_too() -> None:
    assert kind_of(psycopg.OperationalError("connection reset")) is ErrorKind.TRANSIENT
    refused = psycopg.OperationalError("FATAL: password authentication failed for user")
    assert kind_of(refused) is ErrorKind.INSTALLATION
    assert kind_of(psycopg.DataError("a NUL character")) is ErrorKind.DATA


@pytest.mark.parametrize("state", ["42P01", "42501", "08001"])
def test_a_trigger_that_lacks_something_concerns_its_row_alone(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison, state: str
) -> None:
    add_task(connection, task_name="poison")
    add_task(connection)
    outcomes = [Outcome.completed(task, '{"ok":1}') for task in claim(pipeline, 2)]
    blocked = Blocked()
    with poison(connection, POISONOUS, state=state):
        take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
    assert statuses(connection, "work") == {"COMPLETED"}
    assert blocked.includes("record")


@pytest.mark.parametrize("state", ["40001", "53100"])
def test_a_trigger_that_meets_a_busy_server_is_repeated_with_its_batch(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison, state: str
) -> None:
    add_task(connection, task_name="poison")
    outcomes = [Outcome.completed(task, '{"ok":1}') for task in claim(pipeline, 1)]
    with poison(connection, POISONOUS, state=state), pytest.raises(psycopg.Error) as raised:
        take_turn(pipeline, CLAIMER, outcomes, TurnRequest())
    assert kind_of(raised.value) is ErrorKind.TRANSIENT


# With SECURITY DEFINER the function is not inlined, so that it fails for the rows that call it alone.
ASKS_A_TABLE = """
CREATE FUNCTION test_asks(text) RETURNS boolean LANGUAGE sql SECURITY DEFINER AS $$
    SELECT count(*) >= 0 FROM test_rules WHERE name = $1
$$
"""


@pytest.mark.parametrize("lacking", ["table", "right"])
def test_an_sql_function_of_an_operator_that_lacks_something_concerns_its_row_alone(
    connection: Connection[Any], pipeline: Pipeline, lacking: str
) -> None:
    add_task(connection, task_name="poison")
    add_task(connection)
    outcomes = [Outcome.completed(task, '{"ok":1}') for task in claim(pipeline, 2)]
    connection.execute("CREATE TABLE test_rules (name text)")
    connection.execute(ASKS_A_TABLE)
    connection.execute(
        "ALTER TABLE horsies_tasks ADD CONSTRAINT test_rule "
        "CHECK (task_name <> 'poison' OR test_asks(task_name)) NOT VALID"
    )
    blocked = Blocked()
    try:
        if lacking == "table":
            connection.execute("DROP TABLE test_rules")
        else:
            connection.execute("CREATE ROLE test_nobody")
            connection.execute("ALTER FUNCTION test_asks OWNER TO test_nobody")
        take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
    finally:
        connection.execute("DROP FUNCTION test_asks CASCADE")
        connection.execute("DROP TABLE IF EXISTS test_rules")
        connection.execute("DROP ROLE IF EXISTS test_nobody")
    assert statuses(connection, "work") == {"COMPLETED"}
    assert blocked.includes("record")


class Missing(psycopg.errors.UndefinedTable):
    """A missing table, with the context that the server gave."""

    def __init__(self, context: str) -> None:
        super().__init__("relation does not exist")
        self._context = context

    @property
    def diag(self) -> Any:
        return SimpleNamespace(context=self._context)


OWN = "PL/pgSQL function horsies_claim_v1(text) line 5 at SQL statement"


@pytest.mark.parametrize(
    "context",
    [
        "PL/pgSQL function audit() line 3 at SQL statement",
        "PL/pgSQL function audit(horsies_tasks) line 3 at SQL statement",
        "PL/pgSQL-Funktion audit() Zeile 3 bei SQL-Anweisung",
        '在SQL语句的第3行的PL/pgSQL函数audit()\nSQL 语句 "SELECT 1"',
        'PL/pgSQL 함수 "audit()" 의 3번째 SQL 구문',
        'SQL function "audit" during startup',
        "SQL-Funktion »audit« Anweisung 1",
        "fonction SQL « audit », instruction 1",
        'SQL関数"audit"の行番号 1',
        '"audit" SQL 함수를 인라인으로 바꾸는 중',
        'PL/Python function "audit"',
        "PL/Perl-Funktion »audit«",
        f'SQL function "audit" statement 1\nSQL statement "INSERT INTO horsies_tasks"\n{OWN}',
    ],
)
def test_functions_of_an_operator_are_recognised_in_any_language(context: str) -> None:
    assert kind_of(Missing(context)) is ErrorKind.DATA


@pytest.mark.parametrize(
    "context",
    [
        "",
        OWN,
        f"SQL statement \"UPDATE horsies_tasks\n    SET status = 'x'\"\n{OWN}",
        f'PL/pgSQL assignment "found := (SELECT 1)"\n{OWN}',
        f'SQL expression "test_no_function(p_id)"\n{OWN}',
        "在SQL语句的第3行的PL/pgSQL函数horsies_claim_v1(text)",
        'SQL function "horsies_recount" statement 1',
        'SQL関数"horsies_recount"の行番号 1',
        "unnamed portal with parameters: $1 = 'PL/SQL \"audit\"'",
        'COPY horsies_tasks, line 1: "an SQL "',
    ],
)
def test_statements_and_functions_of_our_own_are_the_installation(context: str) -> None:
    assert kind_of(Missing(context)) is ErrorKind.INSTALLATION


def test_a_missing_table_of_our_own_functions_concerns_the_installation(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    connection.execute("ALTER TABLE horsies_queues RENAME TO test_queues")
    try:
        add_task(connection)
        with pytest.raises(psycopg.Error) as raised:
            take_turn(pipeline, CLAIMER, [], TurnRequest(pids=[1]))
        assert kind_of(raised.value) is ErrorKind.INSTALLATION
    finally:
        connection.execute("ALTER TABLE test_queues RENAME TO horsies_queues")


# Recording


def test_a_text_the_database_refuses_fails_its_task_alone(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    for _ in range(3):
        add_task(connection)
    bad, *good = claim(pipeline, 3)
    connection.execute("CREATE INDEX test_results ON horsies_tasks ((result::jsonb))")
    try:
        outcomes = [Outcome.completed(bad, '{"ok":"\\u0000"}')]  # jsonb cannot hold this character
        outcomes += [Outcome.completed(task, '{"ok":1}') for task in good]
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest())
    finally:
        connection.execute("DROP INDEX test_results")
    assert turned.recorded == {bad.id, *(task.id for task in good)}
    assert turned.refused == set()
    assert row_of(connection, bad.id)["error_code"] == "WORKER_SERIALIZATION_ERROR"
    assert {row_of(connection, task.id)["result"] for task in good} == {'{"ok":1}'}
    assert {one.status for one in turned.instead.values()} == {TaskStatus.FAILED}
    assert set(turned.instead) == {bad.id}, "the log names the outcome that is stored"


@pytest.mark.parametrize(
    ("rule", "ending"),
    [
        (
            "CREATE UNIQUE INDEX test_rule ON horsies_tasks (task_name) WHERE status = 'COMPLETED'",
            "DROP INDEX test_rule",
        ),
        (
            "ALTER TABLE horsies_tasks ADD CONSTRAINT test_rule "
            "CHECK (status <> 'COMPLETED' OR task_name <> 'poison')",
            "ALTER TABLE horsies_tasks DROP CONSTRAINT test_rule",
        ),
    ],
    ids=["unique", "check"],
)
def test_a_constraint_of_an_operator_blocks_an_outcome_and_costs_no_result(
    connection: Connection[Any], pipeline: Pipeline, rule: LiteralString, ending: LiteralString
) -> None:
    for name in ("poison", "work"):
        add_task(connection, task_name=name)
    if "UNIQUE" in rule:
        add_task(connection, task_name="poison", result='{"ok":0}', **ENDED)
    outcomes = turn_outcomes(pipeline, 2)
    bad, blocked = outcomes[0].task_id, Blocked("me")
    connection.execute(rule)
    try:
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
    finally:
        connection.execute(ending)
    assert (turned.recorded, turned.refused) == ({outcomes[1].task_id}, {bad})
    assert row_of(connection, bad)["status"] == "RUNNING"
    (row,) = list_blocked.fetch(connection, 5)
    assert (row.id, row.error[:2]) == (bad, "23")
    assert record_alone(pipeline, CLAIMER, outcomes[0], blocked) is not None
    assert row_of(connection, bad)["status"] == "COMPLETED"


def test_an_outcome_a_trigger_refuses_keeps_its_result(
    connection: Connection[Any],
    pipeline: Pipeline,
    poison: Poison,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_task(connection, task_name="poison")
    add_task(connection)
    bad, good = claim(pipeline, 2)
    outcomes = [Outcome.completed(task, '{"ok":1}') for task in (bad, good)]
    with poison(connection, POISONOUS):
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest())
    assert (turned.recorded, turned.refused) == ({good.id}, {bad.id})
    assert row_of(connection, bad.id)["status"] == "RUNNING"
    assert "54000 this row is poisonous" in caplog.text
    assert SECRET not in caplog.text
    assert take_turn(pipeline, CLAIMER, outcomes[:1], TurnRequest()).recorded == {bad.id}
    assert row_of(connection, bad.id)["result"] == '{"ok":1}'


def test_a_refused_outcome_keeps_no_place_under_a_cap(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    capped = Claimer("me", "host", ["default"], [1], 1)
    add_task(connection, task_name="poison")
    add_task(connection)
    request = TurnRequest(pids=[1])
    (bad,) = take_turn(pipeline, capped, [], request).claimed
    assert not take_turn(pipeline, capped, [], request).claimed
    with poison(connection, POISONOUS):
        outcome = Outcome.completed(bad, '{"ok":1}')
        turned = take_turn(pipeline, capped, [outcome], request)
        assert turned.refused == {bad.id}
        assert [task.task_name for task in turned.claimed] == ["work"]


def test_a_locked_record_of_blocked_tasks_delays_one_turn_and_is_written_later(
    process_url: str, connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    clock = Clock()
    blocked = Blocked("me", clock)
    for name in ("poison", "work", "poison"):
        add_task(connection, task_name=name)
    first, good, second = (Outcome.completed(task, '{"ok":1}') for task in claim(pipeline, 3))
    pipeline.connection.execute("SET lock_timeout = '1s'")
    with poison(connection, POISONOUS), psycopg.connect(process_url) as operator:
        operator.execute("LOCK TABLE horsies_blocked")
        turned = take_turn(pipeline, CLAIMER, [first, good], TurnRequest(), blocked)
        assert (turned.refused, turned.recorded) == ({first.task_id}, {good.task_id})
        statements = pipeline.statements
        assert record_alone(pipeline, CLAIMER, second, blocked) is None
        again = pipeline.statements - statements
        operator.rollback()
        statements = pipeline.statements
        blocked.update_record(pipeline)
        assert pipeline.statements == statements, "the table was locked a moment ago"
        clock.now += LOCKED_SECONDS
        blocked.update_record(pipeline)
        (rows,) = pipeline.run([list_blocked(10)])
        assert {row.id for row in rows} == {first.task_id, second.task_id}
        statements = pipeline.statements
        assert record_alone(pipeline, CLAIMER, second, blocked) is None
        assert pipeline.statements - statements == again, "its row is written once"


@pytest.mark.slow
def test_results_of_16_mebibytes_are_recorded_turn_by_turn(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    for _ in range(LARGE_RESULTS):
        add_task(connection)
    ledger, result = Ledger(), "x" * (16 * MEBIBYTES)
    for task in claim(pipeline, LARGE_RESULTS):
        ledger.put(task, State.ENDED, Outcome.completed(task, result))
    turns = 0
    while outcomes := ledger.to_record():
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest())
        assert sum(len(one.result) for one in outcomes) <= TURN_CHARACTERS_MAX
        ledger.close(outcomes, turned)
        turns += 1
    assert turns == LARGE_RESULTS
    assert ledger.is_empty
    assert statuses(connection, "work") == {"COMPLETED"}


def test_an_outcome_larger_than_a_turn_goes_alone() -> None:
    ledger = Ledger()
    for task_id, size in (("small", 1), ("large", TURN_CHARACTERS_MAX + 1), ("last", 1)):
        task = claimed(task_id)
        ledger.put(task, State.ENDED, Outcome.completed(task, "x" * size))
    turns = []
    while outcomes := ledger.to_record():
        turns.append([one.task_id for one in outcomes])
        ledger.close(outcomes, TurnResult(set(turns[-1]), {}, ()))
    assert turns == [["small"], ["large"], ["last"]]


def test_a_statement_that_the_protocol_cannot_carry_is_an_error_of_the_data(
    connection: Connection[Any], pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_id = add_task(connection)
    (task,) = claim(pipeline, 1)
    monkeypatch.setattr(pipeline_module, "MESSAGE_BYTES_MAX", 1000)
    turned = take_turn(
        pipeline, CLAIMER, [Outcome.completed(task, "x" * 2000)], TurnRequest(), Blocked()
    )
    assert turned.recorded == {task_id}
    assert row_of(connection, task_id)["error_code"] == "WORKER_SERIALIZATION_ERROR"


# The other changes


def test_a_batch_of_tasks_that_cannot_be_recovered_does_not_starve_those_behind_them(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    for _ in range(RECOVERY_BATCH + 1):
        abandoned(connection, "poison")
    for _ in range(3):
        abandoned(connection)
    find = partial(find_abandoned, ["dead"], ["RUNNING"], RECOVERY_BATCH)
    with poison(connection, POISONOUS):
        assert recover_found(pipeline, find, Blocked(clock=Clock())) == 3
    assert (statuses(connection, "work"), statuses(connection, "poison")) == (
        {"FAILED"},
        {"RUNNING"},
    )
    assert list_blocked.fetch(connection, 1)[0].total == RECOVERY_BATCH + 1


def test_a_batch_of_tasks_that_cannot_expire_does_not_starve_those_behind_them(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    for _ in range(EXPIRY_BATCH):
        add_task(connection, task_name="poison", good_until=ago(60))
    add_task(connection, good_until=ago(30))
    with poison(connection, POISONOUS):
        assert expire_pending(pipeline) == 1
    assert (statuses(connection, "work"), statuses(connection, "poison")) == (
        {"EXPIRED"},
        {"PENDING"},
    )
    assert expire_pending(pipeline) == EXPIRY_BATCH


def test_a_claim_that_cannot_be_released_does_not_keep_others_from_it(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    add_task(connection, task_name="poison")
    for _ in range(2):
        add_task(connection)
    claim(pipeline, 3)
    blocked = Blocked()
    with poison(connection, POISONOUS):
        assert release_unheld(pipeline, "me", [], blocked) == 2
        assert release_unheld(pipeline, "me", [], blocked) == 0
    assert statuses(connection, "work") == {"PENDING"}
    assert release_unheld(pipeline, "me", [], Blocked()) == 1


def test_tasks_behind_many_that_cannot_be_claimed_are_claimed(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    for _ in range(20):
        add_task(connection, task_name="poison")
    for _ in range(4):
        add_task(connection, enqueued_at=ago(1))
    blocked = Blocked()
    with poison(connection, POISONOUS):
        request = TurnRequest(pids=[1, 2], prefetch=1)
        turned = take_turn(pipeline, CLAIMER, [], request, blocked)
        assert [task.worker_pid for task in turned.claimed] == [1, 2, None]
        (more,) = take_turn(pipeline, CLAIMER, [], request, blocked).claimed
        assert more.task_name == "work"
    assert statuses(connection, "poison") == {"PENDING"}


def test_tasks_with_keys_beside_one_that_cannot_be_claimed_are_claimed(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    add_keyed(connection, "acme", task_name="poison", enqueued_at=ago(90))
    add_keyed(connection, "acme", task_name="behind")
    add_keyed(connection, "zeta", task_name="other")
    add_task(connection, task_name="plain")
    blocked, names = Blocked(), list[str]()
    with poison(connection, POISONOUS):
        for _ in range(3):
            request = TurnRequest(pids=[1, 2, 3, 4], cursors=[0])
            turned = take_turn(pipeline, CLAIMER, [], request, blocked)
            names += [task.task_name for task in turned.claimed]
    assert sorted(names) == ["behind", "other", "plain"]
    assert statuses(connection, "poison") == {"PENDING"}


def test_others_are_claimed_together_until_a_refused_claim_is_tried_again(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    bad = add_task(connection, task_name="poison")
    for _ in range(9):
        add_task(connection, enqueued_at=ago(1))
    clock = Clock()
    blocked = Blocked("me", clock)
    with poison(connection, POISONOUS):
        for transactions in (3, 1, 3):
            taken = take_turn(pipeline, CLAIMER, [], TurnRequest(pids=[1, 2, 3]), blocked).claimed
            ids = [task.id for task in taken]
            query = (
                "SELECT count(DISTINCT xmin::text) FROM horsies_tasks WHERE id = ANY(%s::uuid[])"
            )
            found = connection.execute(query, (ids,)).fetchone()
            assert (len(ids), found) == (3, (transactions,))
            assert blocked.is_waiting(bad)
            clock.now += 1.5 if transactions == 1 else 0.0
    assert statuses(connection, "poison") == {"PENDING"}


def test_many_locked_rows_do_not_keep_a_worker_waiting(
    connection: Connection[Any], pipeline: Pipeline, process_url: str
) -> None:
    for _ in range(31):
        add_task(connection)
    free, *locked = claim(pipeline, 31)
    pipeline.connection.execute("SET lock_timeout = 300")
    outcomes = [Outcome.completed(task, '{"ok":1}') for task in [*locked, free]]
    clock = Clock()
    blocked = Blocked("me", clock)
    with psycopg.connect(process_url) as holder:
        ids = [task.id for task in locked]
        holder.execute("SELECT FROM horsies_tasks WHERE id = ANY(%s::uuid[]) FOR UPDATE", (ids,))
        started = time.monotonic()
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
        assert time.monotonic() - started < 8, "one wait after the other takes nine seconds"
        assert turned.recorded == {free.id}
        assert turned.refused == set(ids)
        clock.now += 1.5
        assert record_alone(pipeline, CLAIMER, outcomes[0], blocked) is None
    clock.now += 10
    again = take_turn(pipeline, CLAIMER, outcomes[:-1], TurnRequest(), blocked)
    assert again.recorded == set(ids)


def test_claims_one_by_one_leave_out_unknown_and_refused_tasks(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    refused = add_task(connection, task_name="other", enqueued_at=ago(4))
    for _ in range(3):
        add_task(connection, task_name="unknown", enqueued_at=ago(3))
    add_task(connection, task_name="poison", enqueued_at=ago(2))
    add_task(connection, enqueued_at=ago(1))
    request = TurnRequest(pids=[1, 2], unknown_names=["unknown"], refused_ids=[refused])
    blocked = Blocked()
    with poison(connection, POISONOUS):
        (claimed,) = take_turn(pipeline, CLAIMER, [], request, blocked).claimed
        assert claimed.task_name == "work"
        assert blocked.includes("claim")
        assert not take_turn(pipeline, CLAIMER, [], request, blocked).claimed
    assert statuses(connection, "unknown") == statuses(connection, "other") == {"PENDING"}


def test_an_unknown_task_that_cannot_be_changed_does_not_keep_others_from_failing(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    for name in ("poison", "unknown", "poison", "unknown", "work"):
        add_task(connection, task_name=name, enqueued_at=ago(60))
    check = ClaimUnresolvable("me", "host", ["default"], ["poison", "unknown"], 30.0, 10)
    blocked = Blocked()
    with poison(connection, POISONOUS):
        found = claim_unknown(pipeline, check, blocked)
        assert [task.task_name for task in found] == ["unknown", "unknown"]
        assert claim_unknown(pipeline, check, blocked) == [], "without another refusal"
    assert list_blocked.fetch(connection, 5)[0].total == 2
    assert not blocked.includes("claim"), "tasks that it knows are claimed together"
    assert [task.task_name for task in claim_unknown(pipeline, check, Blocked())] == ["poison"] * 2
    assert statuses(connection, "work") == {"PENDING"}


def test_a_search_for_unknown_tasks_one_by_one_leaves_out_those_within_the_grace_period(
    connection: Connection[Any], pipeline: Pipeline, poison: Poison
) -> None:
    for name in ("poison", "unknown"):
        add_task(connection, task_name=name, enqueued_at=ago(60))
    for _ in range(2):
        add_task(connection, task_name="unknown", priority=1, enqueued_at=ago(5))
    check = ClaimUnresolvable("me", "host", ["default"], ["poison", "unknown"], 30.0, 2)
    with poison(connection, POISONOUS):
        found = claim_unknown(pipeline, check, Blocked())
    assert [(task.task_name, task.priority) for task in found] == [("unknown", 100)]


def test_a_locked_row_does_not_end_the_sweep(
    connection: Connection[Any], pipeline: Pipeline, process_url: str
) -> None:
    connection.execute(
        "INSERT INTO horsies_workers (worker_id, lock_key, hostname, pid, processes, queues, stopped_at) "
        "VALUES ('old', 1, 'host', 1, 1, '{default}', now() - interval '10 days')"
    )
    old = add_task(connection, id="00000000-0000-7000-8000-000000000001", **ENDED)
    pipeline.connection.execute("SET lock_timeout = 100")
    recovery = RecoveryConfig(worker_state_retention_hours=1, terminal_record_retention_hours=1)
    with psycopg.connect(process_url) as holder:
        holder.execute("SELECT FROM horsies_workers FOR UPDATE")
        assert not sweep(pipeline, recovery)
    assert not connection.execute("SELECT FROM horsies_tasks WHERE id = %s", (old,)).fetchall()


def test_rows_that_retention_cannot_delete_do_not_end_the_sweep(
    connection: Connection[Any], pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    kept = add_task(connection, id="00000000-0000-7000-8000-000000000001", **ENDED)
    connection.execute("CREATE TABLE test_orders (task_id uuid REFERENCES horsies_tasks (id))")
    try:
        connection.execute("INSERT INTO test_orders VALUES (%s)", (kept,))
        assert not sweep(pipeline, RecoveryConfig(terminal_record_retention_hours=1))
    finally:
        connection.execute("DROP TABLE test_orders")
    assert "delete_old_tasks" in caplog.text
    assert kept not in caplog.text


# Errors that usually pass


def turn_outcomes(pipeline: Pipeline, count: int) -> list[Outcome]:
    return [Outcome.completed(task, '{"ok":1}') for task in claim(pipeline, count)]


@pytest.mark.parametrize("state", ["57014", "53200", "53400", "25P04", "40001"])
def test_the_third_failure_in_a_row_with_an_error_that_may_pass_is_isolated(
    connection: Connection[Any], pipeline: Pipeline, state: str
) -> None:
    add_task(connection, task_name="poison")
    add_task(connection)
    outcomes, blocked = turn_outcomes(pipeline, 2), Blocked("me")
    with poisoned(connection, POISONOUS, state=state):
        for _ in range(PATIENCE - 1):
            with pytest.raises(psycopg.Error):
                take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
    assert len(turned.recorded) == len(turned.refused) == 1
    assert statuses(connection, "work") == {"COMPLETED"}
    (row,) = list_blocked.fetch(connection, 5)
    assert {row.id} == turned.refused
    assert row.error.startswith(state)


def recover(pipeline: Pipeline, blocked: Blocked) -> object:
    find = partial(find_abandoned, ["dead"], ["RUNNING"], RECOVERY_BATCH)
    return recover_found(pipeline, find, blocked)


def release(pipeline: Pipeline, blocked: Blocked) -> object:
    return release_unheld(pipeline, "dead", [], blocked)


def claim_two(pipeline: Pipeline, blocked: Blocked) -> object:
    return take_turn(pipeline, CLAIMER, [], TurnRequest(pids=[1, 2]), blocked)


def fail_unknown(pipeline: Pipeline, blocked: Blocked) -> object:
    check = ClaimUnresolvable("me", "host", ["default"], ["poison", "work"], 30.0, 10)
    return claim_unknown(pipeline, check, blocked)


@pytest.mark.parametrize(
    ("job", "before", "after"),
    [
        (recover, "RUNNING", "FAILED"),
        (release, "RUNNING", "PENDING"),
        (claim_two, "PENDING", "RUNNING"),
        (fail_unknown, "PENDING", "RUNNING"),
    ],
)
def test_every_kind_of_batch_finds_the_task_that_lastingly_fails(
    connection: Connection[Any],
    pipeline: Pipeline,
    job: Callable[[Pipeline, Blocked], object],
    before: str,
    after: str,
) -> None:
    for name in ("poison", "work"):
        if before == "RUNNING":
            abandoned(connection, name)
        else:
            add_task(connection, task_name=name, enqueued_at=ago(60))
    blocked = Blocked("me")
    with poisoned(connection, POISONOUS, state="57014"):
        for _ in range(PATIENCE - 1):
            with pytest.raises(psycopg.errors.QueryCanceled):
                job(pipeline, blocked)
        job(pipeline, blocked)
    assert (statuses(connection, "work"), statuses(connection, "poison")) == ({after}, {before})
    (row,) = list_blocked.fetch(connection, 5)
    assert row.error.startswith("57014")


@pytest.mark.parametrize("state", ["53100", "53300"])
def test_an_error_of_the_whole_server_is_never_isolated(
    connection: Connection[Any], pipeline: Pipeline, state: str
) -> None:
    add_task(connection, task_name="poison")
    outcomes, blocked = turn_outcomes(pipeline, 1), Blocked("me")
    with poisoned(connection, POISONOUS, state=state):
        for _ in range(2 * PATIENCE):
            with pytest.raises(psycopg.Error):
                take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
    assert list_blocked.fetch(connection, 5) == []


def test_failures_of_another_kind_of_batch_or_before_a_success_do_not_count() -> None:
    failures, error = Failures(), lookup("57014")("x")
    for _ in range(PATIENCE - 1):
        assert not failures.is_isolated("turn", error)
        assert not failures.is_isolated("expire", error)
    failures.forget("turn")
    assert not failures.is_isolated("turn", error)
    assert failures.is_isolated("expire", error)


def test_a_search_that_costs_the_session_goes_on_with_the_next(
    connection: Connection[Any], pipeline: Pipeline, process_url: str
) -> None:
    for name in ("poison", "work", "work"):
        add_task(connection, task_name=name)
    outcomes, blocked = turn_outcomes(pipeline, 3), Blocked("me")
    with (
        poisoned(connection, POISONOUS, state="53200"),
        psycopg.connect(process_url, autocommit=True) as first,
    ):
        for _ in range(PATIENCE - 1):
            with pytest.raises(psycopg.Error):
                take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
        breaking = Pipeline(first)
        run = breaking.run
        cut: list[int] = []

        def run_and_cut(steps: Any, timeout_seconds: float | None = None) -> Any:
            if cut:
                first.close()
            try:
                return run(steps, timeout_seconds)
            finally:
                if timeout_seconds is not None:  # the first task alone has had its turn
                    cut.append(1)

        breaking.run = run_and_cut  # type: ignore[method-assign]
        with pytest.raises(psycopg.OperationalError):
            take_turn(breaking, CLAIMER, outcomes, TurnRequest(), blocked)
        assert list_blocked.fetch(connection, 5) == []
        with psycopg.connect(process_url, autocommit=True) as second:
            turned = take_turn(Pipeline(second), CLAIMER, outcomes, TurnRequest(), blocked)
    assert turned.refused == {outcomes[0].task_id}
    assert statuses(connection, "work") == {"COMPLETED"}
    (row,) = list_blocked.fetch(connection, 5)
    assert row.id == outcomes[0].task_id


def test_a_change_that_takes_too_long_rests_for_longer_and_leaves_others_less_time(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    task_id, clock = add_task(connection), Clock()
    blocked = Blocked("me", clock)
    patient_seconds = blocked.seconds_alone()
    blocked.note(pipeline, Change("record", task_id), lookup("57014")("x"), taken_seconds=2.0)
    assert blocked.seconds_alone() < patient_seconds
    clock.now += 19.5
    assert blocked.is_waiting(task_id)
    clock.now += 1
    assert not blocked.is_waiting(task_id)
    assert blocked.seconds_alone() == patient_seconds


def test_a_change_that_takes_too_long_may_take_longer_each_time(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    task_id, clock = add_task(connection), Clock()
    blocked = Blocked("me", clock)
    change, limits = Change("record", task_id), []
    for _ in range(3):
        limits.append(blocked.seconds_alone(task_id))
        blocked.note(pipeline, change, lookup("57014")("x"), taken_seconds=limits[-1])
        # Another attempt, while the worker is impatient, is no reason to begin anew.
        blocked.note(pipeline, change, lookup("57014")("x"), taken_seconds=1.0)
        clock.now += 1000
    assert limits == [10, 20, 40]
    assert blocked.seconds_alone("another") == 10
    blocked.forget(change)
    assert blocked.seconds_alone(task_id) == 10


# The same error for every task


def test_the_database_is_named_when_it_refuses_every_task_of_a_batch_alike(
    connection: Connection[Any], pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        add_task(connection)
    outcomes, clock = turn_outcomes(pipeline, 5), Clock()
    blocked = Blocked("me", clock)
    with poisoned(connection, "NEW.status = 'COMPLETED'"):
        turned = take_turn(pipeline, CLAIMER, outcomes, TurnRequest(), blocked)
        assert turned.refused == {one.task_id for one in outcomes}
        for _ in range(12):
            clock.now += 400
            for one in outcomes:
                assert record_alone(pipeline, CLAIMER, one, blocked) is None
        assert "is blocked" not in caplog.text
        assert caplog.text.count("refuses to record every task with the same error: 54000") == 1
        assert len(list_blocked.fetch(connection, 9)) == 5, "explain has the reason"
    # The first is tried again soon, and its success brings the others.
    assert len(blocked.excluded()) == 5
    clock.now += LONGEST_LOCK_SECONDS
    assert len(blocked.excluded()) == 4
    assert record_alone(pipeline, CLAIMER, outcomes[0], blocked) is not None
    assert blocked.excluded() == []
    for one in outcomes[1:]:
        assert record_alone(pipeline, CLAIMER, one, blocked) is not None
    assert list_blocked.fetch(connection, 9) == []
    blocked.update_record(pipeline)
    assert connection.execute("SELECT FROM horsies_blocked").fetchall() == []


def test_the_database_is_named_when_it_refuses_one_task_after_the_other_alike(
    connection: Connection[Any], pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = Blocked("me")
    with poisoned(connection, "NEW.status = 'COMPLETED'"):
        for _ in range(6):
            add_task(connection)
            take_turn(pipeline, CLAIMER, turn_outcomes(pipeline, 1), TurnRequest(), blocked)
    assert caplog.text.count("is blocked") == ALIKE - 1
    assert caplog.text.count("every task with the same error") == 1


def test_a_success_in_between_clears_the_database(
    connection: Connection[Any], pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = Blocked("me")
    with poisoned(connection, "NEW.status = 'COMPLETED' AND NEW.task_name = 'poison'"):
        for name in ["poison", "poison", "work", "poison", "poison"]:
            add_task(connection, task_name=name)
            take_turn(pipeline, CLAIMER, turn_outcomes(pipeline, 1), TurnRequest(), blocked)
    assert caplog.text.count("is blocked") == 4
    assert "every task" not in caplog.text


# Waits and records


def refused() -> psycopg.Error:
    return lookup("54000")("x")


def test_waits_double_from_a_second_to_five_minutes(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    task_id, clock = add_task(connection), Clock()
    blocked = Blocked("me", clock)
    waits = []
    for _ in range(11):
        blocked.note(pipeline, Change("expire", task_id), refused())
        began = clock.now
        while blocked.is_waiting(task_id):
            assert blocked.excluded() == [task_id]
            clock.now += 0.5
        waits.append(clock.now - began)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert blocked.includes("expire")
    clock.now += 61
    assert not blocked.includes("expire"), "changed by another process"


def test_one_worker_of_all_logs_a_blocked_task(
    connection: Connection[Any], pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    task_id = add_task(connection)
    for worker_id in ("one", "two"):
        blocked = Blocked(worker_id)
        blocked.note(pipeline, Change("expire", task_id), refused())
        blocked.note(pipeline, Change("expire", task_id), refused())
    assert caplog.text.count("is blocked") == 1
    (row,) = list_blocked.fetch(connection, 5)
    assert (row.id, row.kind, row.action, row.worker_id) == (task_id, "task", "expire", "one")
    # Another generation may be blocked anew.
    connection.execute("UPDATE horsies_tasks SET generation = generation + 1")
    assert list_blocked.fetch(connection, 5) == []
    Blocked("two").note(pipeline, Change("expire", task_id), refused())
    assert caplog.text.count("is blocked") == 2


def test_a_refusal_is_described_without_detail_or_context(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    add_task(connection, task_name="poison")
    with (
        poisoned(connection, POISONOUS, state="22023"),
        pytest.raises(psycopg.Error) as raised,
    ):
        connection.execute("UPDATE horsies_tasks SET held = true")
    assert SECRET in str(raised.value)
    assert describe_refusal(raised.value) == "22023 this row is poisonous"
