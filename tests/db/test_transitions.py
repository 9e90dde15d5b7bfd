"""Every verb against every status on the real statements: allowed ones change the row, others do not
touch it. Nothing but the owner of the current generation records an outcome.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args

import psycopg
import pytest
from psycopg import Connection, sql
from psycopg.errors import InvalidTextRepresentation

from horsies.db.statements.durable import ParkedTask, ParkTasks, park_tasks
from horsies.db.statements.tasks import CancelledTask, cancel_tasks
from horsies.db.statements.transactions import complete_own
from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    ExpireTasks,
    FailTasks,
    FinishedTask,
    ReleaseClaimed,
    ReleaseLapsed,
    ReleaseUnstarted,
    RenewClaims,
    RetriedTask,
    RetryTasks,
    SendHeartbeats,
    StartTasks,
    StoreProgress,
    claim_tasks,
    complete_tasks,
    expire_tasks,
    fail_tasks,
    release_claimed,
    release_lapsed,
    release_unstarted,
    renew_claims,
    retry_tasks,
    send_heartbeats,
    start_tasks,
    store_progress,
)
from horsies.db.task_transaction import ENDED_BY_TASK, LOST, refusal_of
from horsies.parking import ParkRequest
from horsies.states import TaskStatus
from horsies.tasks.outcome import STOPPED_FOR_REQUEUE, outcome_of_stop, recording_steps
from tests.support.database import lock_waiters
from tests.support.rows import add_task, attempts_of, picture, row_of
from tests.support.transitions import TaskVerb, allowed
from tests.support.wait import wait_until

OWNER = "worker-1"
GENERATION = 3
PAST = sql.SQL("now() - interval '1 minute'")
FUTURE = sql.SQL("now() + interval '1 hour'")


def row_in(connection: Connection[Any], status: str, **columns: Any) -> str:
    """A task in this status that would pass every check but the one on its status."""
    return add_task(
        connection,
        status=status,
        generation=GENERATION,
        claimed_by_worker_id=OWNER,
        claimed_at=PAST,
        started_at=PAST,
        worker_hostname="host",
        worker_pid=4711,
        worker_process_name="worker-4711",
        retry_count=1,
        max_retries=5,
        **columns,
    )


def complete(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> list[FinishedTask]:
    return complete_tasks.run(
        connection, CompleteTasks(owner, [task_id], [generation], ['{"ok":1}'])
    )


def complete_in_transaction(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> list[FinishedTask]:
    """``complete`` by the child of a task with a transaction, in that transaction."""
    refusal = refusal_in_transaction(
        connection, f"{task_id}/{generation}", task_id, owner, generation
    )
    assert refusal in (None, LOST)
    return [] if refusal else [FinishedTask(task_id)]


def refusal_in_transaction(
    connection: Connection[Any], mark: str, task_id: str, owner: str, generation: int
) -> str | None:
    """Complete a task in a transaction that has this mark; return why that is refused."""
    expected = f"{task_id}/{generation}"
    try:
        with connection.transaction():
            connection.execute("SELECT set_config('horsies.attempt', %s, true)", (mark,))
            complete_own.fetch(connection, owner, task_id, generation, expected, '{"ok":1}')
    except InvalidTextRepresentation as error:
        return refusal_of(error)
    return None


def fail(
    connection: Connection[Any],
    task_id: str,
    owner: str = OWNER,
    generation: int = GENERATION,
    status: str = "FAILED",
) -> list[FinishedTask]:
    return fail_tasks.run(
        connection,
        FailTasks(
            owner,
            [task_id],
            [generation],
            [status],
            ['{"err":1}'],
            ["FAILED"],
            ["BROKE"],
            ["it broke"],
            ["line 1"],
        ),
    )


def retry(
    connection: Connection[Any],
    task_id: str,
    owner: str = OWNER,
    generation: int = GENERATION,
    delay_seconds: float = 60.0,
) -> list[RetriedTask]:
    return retry_tasks.run(
        connection,
        RetryTasks(
            owner,
            [task_id],
            [generation],
            [delay_seconds],
            ["WORKER_FAILURE"],
            ["CRASHED"],
            ["it crashed"],
            ["signal 9"],
        ),
    )


def park(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> list[ParkedTask]:
    request = ParkRequest(seconds=60).to_json()
    return park_tasks.run(connection, ParkTasks(owner, [task_id], [generation], [request]))


def heartbeat(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> list[FinishedTask]:
    return send_heartbeats.run(connection, SendHeartbeats(owner, "host", [task_id], [generation]))


def progress(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> list[FinishedTask]:
    report = StoreProgress(owner, [task_id], [generation], [3.0], [None], ["half"])
    return store_progress.run(connection, report)


def claim(connection: Connection[Any], task_id: str) -> Any:
    return claim_tasks.run(
        connection, ClaimTasks("worker-2", "elsewhere", [815], ["default"], [10])
    )


def prefetch(connection: Connection[Any], task_id: str) -> Any:
    return claim_tasks.run(
        connection, ClaimTasks("worker-2", "elsewhere", [], ["default"], [10], prefetch=1)
    )


def start(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> Any:
    return start_tasks.run(connection, StartTasks(owner, [task_id], [generation], [815]))


def renew(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> Any:
    claims = RenewClaims(owner, [task_id], [generation], lease_ms=60_000, max_age_ms=3_600_000)
    return renew_claims.run(connection, claims)


def release_of_the_dead(
    connection: Connection[Any], task_id: str, owner: str = OWNER, generation: int = GENERATION
) -> Any:
    return release_claimed.run(connection, ReleaseClaimed(owner, [task_id], [generation]))


def release_when_lapsed(connection: Connection[Any], task_id: str) -> Any:
    return release_lapsed.run(connection, ReleaseLapsed(10))


def release(connection: Connection[Any], task_id: str) -> Any:
    return release_unstarted.run(connection, ReleaseUnstarted(OWNER, [], []))


def expire(connection: Connection[Any], task_id: str) -> Any:
    return expire_tasks.run(connection, ExpireTasks('{"err":"late"}', 10))


def ask_to_cancel(
    connection: Connection[Any], task_id: str, *, running: bool = True
) -> CancelledTask:
    (met,) = cancel_tasks.fetch(connection, [task_id], running)
    return met


def cancel(connection: Connection[Any], task_id: str) -> Any:
    """Ask, and where the task was running, end it as its worker would."""
    if ask_to_cancel(connection, task_id).was_status == "RUNNING":
        fail(connection, task_id, status="CANCELLED")


ACTS: dict[TaskVerb, Callable[[Connection[Any], str], Any]] = {
    "claim_and_start": claim,
    "claim": prefetch,
    "start": start,
    "complete": complete,
    "fail": fail,
    "retry": retry,
    "park": park,
    "release": release,
    "expire": expire,
    "cancel": cancel,
}
FENCED = [complete, complete_in_transaction, fail, retry, park, heartbeat, progress]
ENDS = [complete, complete_in_transaction, fail, retry]

STARTED = {"claimed_by_worker_id", "claimed_at", "started_at"}
WORKER = {"worker_hostname", "worker_pid", "worker_process_name"}
CHANGES: dict[tuple[TaskVerb, str], set[str]] = {
    ("claim_and_start", "PENDING"): {"generation"} | STARTED | WORKER,
    ("claim", "PENDING"): {"generation", "claimed", "claim_expires_at"} | STARTED | WORKER,
    ("start", "CLAIMED"): {
        "claimed",
        "claim_expires_at",
        "started_at",
        "worker_pid",
        "worker_process_name",
    },
    ("complete", "RUNNING"): {"completed_at", "result"},
    ("fail", "RUNNING"): {"failed_at", "result", "error_code", "failed_reason"},
    ("retry", "RUNNING"): {
        "retry_count",
        "claimed_by_worker_id",
        "claimed_at",
        "next_retry_at",
        "enqueued_at",
    },
    ("park", "RUNNING"): STARTED | WORKER | {"enqueued_at"},
    ("release", "CLAIMED"): STARTED | WORKER,
    ("release", "RUNNING"): STARTED | WORKER,
    ("expire", "PENDING"): {"failed_at", "result", "error_code"},
    ("cancel", "PENDING"): {"failed_at", "error_code", "cancel_requested_at"},
    ("cancel", "CLAIMED"): {"failed_at", "error_code", "cancel_requested_at"},
}


def columns_for(verb: TaskVerb) -> dict[str, Any]:
    """The columns that a row needs besides its status for the verb to apply."""
    match verb:
        case "expire":
            return {"good_until": PAST}
        case "start":
            return {"claimed": True, "claim_expires_at": FUTURE}
        case _:
            return {}


def test_every_verb_has_a_statement() -> None:
    assert set(ACTS) == set(get_args(TaskVerb))


@pytest.mark.parametrize(
    ("verb", "status"), list(itertools.product(get_args(TaskVerb), TaskStatus))
)
def test_a_verb_changes_a_row_exactly_where_the_table_allows_it(
    connection: Connection[Any], verb: TaskVerb, status: TaskStatus
) -> None:
    task_id = row_in(connection, status.value, **columns_for(verb))
    before = picture(connection, task_id)
    ACTS[verb](connection, task_id)
    target = allowed(verb, status)
    if target is None:
        assert picture(connection, task_id) == before
        assert attempts_of(connection, task_id) == []
    else:
        assert row_of(connection, task_id)["status"] == target.value


@pytest.mark.parametrize(("verb", "status"), list(CHANGES))
def test_a_verb_changes_its_own_columns_and_no_others(
    connection: Connection[Any], verb: TaskVerb, status: str
) -> None:
    task_id = row_in(connection, status, **columns_for(verb))
    before = row_of(connection, task_id)
    ACTS[verb](connection, task_id)
    after = row_of(connection, task_id)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == CHANGES[verb, status] | {"status", "updated_at"}


def comparable(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns without their ids; of a time, only whether there is one."""
    return {
        name: value is not None if name.endswith("_at") else value
        for name, value in columns.items()
        if name not in ("id", "task_id")
    }


@pytest.mark.parametrize("status", TaskStatus)
@pytest.mark.parametrize("has_attempt", [False, True])
def test_a_turn_and_a_child_complete_a_task_alike(
    connection: Connection[Any], status: TaskStatus, has_attempt: bool
) -> None:
    """Two statements have the same guard and the same effect."""
    ends: list[Any] = []
    for act in (complete, complete_in_transaction):
        task_id = row_in(connection, status.value)
        if has_attempt:
            connection.execute(
                "INSERT INTO horsies_task_attempts (task_id, attempt, outcome, finished_at) "
                "VALUES (%s, 2, 'FAILED', now())",
                (task_id,),
            )
        before = row_of(connection, task_id)
        met = len(act(connection, task_id))
        after = row_of(connection, task_id)
        changed = {name for name in before if before[name] != after[name]}
        attempts = [comparable(one) for one in attempts_of(connection, task_id)]
        ends.append((met, changed, comparable(after), attempts))
    of_turn, of_child = ends
    assert of_child == of_turn or has_attempt
    assert of_child[1:] == of_turn[1:]


def test_a_child_completes_nothing_in_a_transaction_that_is_not_its_own(
    connection: Connection[Any],
) -> None:
    task_id = row_in(connection, "RUNNING")
    before = picture(connection, task_id)
    refusal = refusal_in_transaction(connection, "another", task_id, OWNER, GENERATION)
    assert refusal == ENDED_BY_TASK
    assert picture(connection, task_id) == before


@pytest.mark.parametrize("act", FENCED)
@pytest.mark.parametrize(
    ("owner", "generation"),
    [(OWNER, GENERATION - 1), (OWNER, GENERATION + 1), ("worker-2", GENERATION), ("", GENERATION)],
)
def test_a_wrong_owner_or_generation_never_changes_anything(
    connection: Connection[Any],
    act: Callable[..., list[FinishedTask]],
    owner: str,
    generation: int,
) -> None:
    task_id = row_in(connection, "RUNNING")
    before = picture(connection, task_id)
    assert act(connection, task_id, owner, generation) == []
    assert picture(connection, task_id) == before
    assert attempts_of(connection, task_id) == []
    assert connection.execute("SELECT 1 FROM horsies_heartbeats").fetchall() == []


@pytest.mark.parametrize("act", [start, renew, release_of_the_dead])
@pytest.mark.parametrize(
    ("owner", "generation"),
    [(OWNER, GENERATION - 1), (OWNER, GENERATION + 1), ("worker-2", GENERATION)],
)
def test_a_prefetched_task_is_fenced_as_well(
    connection: Connection[Any], act: Callable[..., Any], owner: str, generation: int
) -> None:
    task_id = row_in(connection, "CLAIMED", claimed=True, claim_expires_at=FUTURE)
    before = picture(connection, task_id)
    assert act(connection, task_id, owner, generation) == []
    assert picture(connection, task_id) == before


@pytest.mark.parametrize(
    "columns", [{"claim_expires_at": PAST}, {"claim_expires_at": FUTURE, "good_until": PAST}]
)
def test_a_prefetched_task_does_not_start_past_its_lease_or_deadline(
    connection: Connection[Any], columns: dict[str, Any]
) -> None:
    task_id = row_in(connection, "CLAIMED", claimed=True, **columns)
    before = picture(connection, task_id)
    assert start(connection, task_id) == []
    assert picture(connection, task_id) == before


@pytest.mark.parametrize("act", [release_of_the_dead, release_when_lapsed, renew])
@pytest.mark.parametrize("status", TaskStatus)
def test_a_lease_is_renewed_or_ended_only_while_the_task_is_prefetched(
    connection: Connection[Any], act: Callable[..., Any], status: TaskStatus
) -> None:
    task_id = row_in(connection, status.value, claimed=True, claim_expires_at=PAST)
    before = picture(connection, task_id)
    changed = act(connection, task_id)
    assert [row.id for row in changed] == ([task_id] if status is TaskStatus.CLAIMED else [])
    assert (picture(connection, task_id) == before) is (status is not TaskStatus.CLAIMED)
    if changed:
        expected = "CLAIMED" if act is renew else "PENDING"
        assert row_of(connection, task_id)["status"] == expected


def test_a_lease_that_holds_is_not_ended(connection: Connection[Any]) -> None:
    task_id = row_in(connection, "CLAIMED", claimed=True, claim_expires_at=FUTURE)
    assert release_when_lapsed(connection, task_id) == []


def test_a_worker_releases_only_its_own_rows_that_it_does_not_hold(
    connection: Connection[Any],
) -> None:
    lost, held = row_in(connection, "RUNNING"), row_in(connection, "RUNNING")
    foreign = add_task(connection, status="RUNNING", claimed_by_worker_id="worker-2")
    before = picture(connection, held), picture(connection, foreign)
    released = release_unstarted.run(connection, ReleaseUnstarted(OWNER, [held], [GENERATION]))
    assert [row.id for row in released] == [lost]
    assert (picture(connection, held), picture(connection, foreign)) == before


def test_an_attempt_in_hand_does_not_keep_a_later_claim_of_the_same_task(
    connection: Connection[Any],
) -> None:
    claimed_again, held = row_in(connection, "RUNNING"), row_in(connection, "RUNNING")
    in_hand = ReleaseUnstarted(OWNER, [claimed_again, held], [GENERATION - 1, GENERATION])
    assert [row.id for row in release_unstarted.run(connection, in_hand)] == [claimed_again]


def test_a_stale_report_does_not_keep_its_neighbours_from_being_recorded(
    connection: Connection[Any],
) -> None:
    ids = [row_in(connection, "RUNNING") for _ in range(3)]
    generations = [GENERATION, GENERATION - 1, GENERATION]
    reports = CompleteTasks(OWNER, ids, generations, ["1", "2", "3"])
    recorded = complete_tasks.run(connection, reports)
    assert {row.task_id for row in recorded} == {ids[0], ids[2]}
    assert [row_of(connection, task_id)["status"] for task_id in ids] == [
        "COMPLETED",
        "RUNNING",
        "COMPLETED",
    ]
    assert row_of(connection, ids[2])["result"] == "3"


COMPLETED = {"outcome": "COMPLETED", "will_retry": False, "error_code": None}
EXPECTED_ATTEMPTS = [
    (complete, COMPLETED),
    (complete_in_transaction, COMPLETED),
    (fail, {"outcome": "FAILED", "will_retry": False, "error_code": "BROKE"}),
    (retry, {"outcome": "WORKER_FAILURE", "will_retry": True, "error_code": "CRASHED"}),
]


@pytest.mark.parametrize(("act", "expected"), EXPECTED_ATTEMPTS)
def test_an_outcome_and_its_attempt_are_one_statement(
    connection: Connection[Any],
    act: Callable[..., list[FinishedTask]],
    expected: dict[str, Any],
) -> None:
    task_id = row_in(connection, "RUNNING")
    started_at = row_of(connection, task_id)["started_at"]
    assert act(connection, task_id) == [FinishedTask(task_id)]
    (attempt,) = attempts_of(connection, task_id)
    assert expected.items() <= attempt.items()
    assert attempt["attempt"] == 2, "one retry came before"
    assert attempt["worker_id"] == OWNER
    assert attempt["worker_pid"] == 4711
    assert attempt["started_at"] == started_at < attempt["finished_at"]
    same = connection.execute(
        "SELECT task.xmin = attempt.xmin FROM horsies_tasks AS task "
        "JOIN horsies_task_attempts AS attempt ON attempt.task_id = task.id"
    )
    assert same.fetchall() == [(True,)]


@pytest.mark.parametrize("act", ENDS)
def test_recording_an_outcome_again_is_harmless(
    connection: Connection[Any], act: Callable[..., list[FinishedTask]]
) -> None:
    task_id = row_in(connection, "RUNNING")
    act(connection, task_id)
    after_first = picture(connection, task_id), attempts_of(connection, task_id)
    assert act(connection, task_id) == []
    assert (picture(connection, task_id), attempts_of(connection, task_id)) == after_first


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(ENDS, 2)))
def test_the_first_recorded_outcome_stands(
    connection: Connection[Any],
    first: Callable[..., list[FinishedTask]],
    second: Callable[..., list[FinishedTask]],
) -> None:
    task_id = row_in(connection, "RUNNING")
    assert first(connection, task_id)
    after_first = picture(connection, task_id)
    assert second(connection, task_id) == []
    assert picture(connection, task_id) == after_first
    assert len(attempts_of(connection, task_id)) == 1


def test_a_retry_is_due_after_its_delay_and_says_so_twice(connection: Connection[Any]) -> None:
    task_id = row_in(connection, "RUNNING", good_until=FUTURE)
    retry(connection, task_id, delay_seconds=60)
    found = connection.execute(
        "SELECT enqueued_at = next_retry_at, "
        "extract(epoch FROM enqueued_at - clock_timestamp())::float8 FROM horsies_tasks"
    ).fetchone()
    assert found is not None
    assert found[0]
    assert 50 < found[1] <= 60


def test_a_retry_past_the_deadline_falls_through_to_failure(connection: Connection[Any]) -> None:
    task_id = row_in(connection, "RUNNING", good_until=FUTURE)
    before = picture(connection, task_id)
    assert retry(connection, task_id, delay_seconds=2 * 3600) == []
    assert picture(connection, task_id) == before
    assert fail(connection, task_id) == [FinishedTask(task_id)]
    row = row_of(connection, task_id)
    assert (row["status"], row["error_code"], row["retry_count"]) == ("FAILED", "BROKE", 1)
    assert [one["will_retry"] for one in attempts_of(connection, task_id)] == [False]


def test_a_retry_of_a_task_that_should_be_cancelled_falls_through(
    connection: Connection[Any],
) -> None:
    task_id = row_in(connection, "RUNNING")
    ask_to_cancel(connection, task_id)
    assert retry(connection, task_id) == []
    assert fail(connection, task_id, status="CANCELLED") == [FinishedTask(task_id)]
    assert row_of(connection, task_id)["status"] == "CANCELLED"


@pytest.mark.parametrize(
    ("is_cancelled", "good_until", "status", "code"),
    [
        (True, None, "CANCELLED", "TASK_CANCELLED"),
        (True, PAST, "CANCELLED", "TASK_CANCELLED"),
        (False, PAST, "FAILED", "WORKER_STOPPED"),
        (False, None, "PENDING", None),
    ],
)
def test_an_accepted_cancel_comes_before_the_return_to_the_queue(
    connection: Connection[Any], is_cancelled: bool, good_until: Any, status: str, code: str | None
) -> None:
    task_id = row_in(connection, "RUNNING", good_until=good_until)
    if is_cancelled:
        ask_to_cancel(connection, task_id)
    task = ClaimedTask(task_id, GENERATION, "work", "default", "[]", "{}", 1, 5, None, None, 4711)
    steps = recording_steps(OWNER, [outcome_of_stop(task, STOPPED_FOR_REQUEUE)])
    recorded = [
        one for statement, values in steps.values() for one in statement.run(connection, values)
    ]
    assert recorded == [FinishedTask(task_id)]
    row = row_of(connection, task_id)
    assert (row["status"], row["error_code"]) == (status, code)
    (attempt,) = attempts_of(connection, task_id)
    assert attempt["error_code"] == (code or "WORKER_STOPPED")


def test_an_unstarted_task_whose_cancel_was_accepted_is_cancelled_on_release(
    connection: Connection[Any],
) -> None:
    task_id = row_in(connection, "RUNNING")
    ask_to_cancel(connection, task_id)
    release(connection, task_id)
    row = row_of(connection, task_id)
    assert (row["status"], row["error_code"]) == ("CANCELLED", "TASK_CANCELLED")
    assert row["failed_at"] is not None
    assert attempts_of(connection, task_id) == []


CANCELS = [
    ("PENDING", True, CancelledTask("", "PENDING", True)),
    ("CLAIMED", True, CancelledTask("", "CLAIMED", True)),
    ("RUNNING", True, CancelledTask("", "RUNNING", True)),
    ("RUNNING", False, CancelledTask("", "RUNNING", False)),
    ("COMPLETED", True, CancelledTask("", "COMPLETED", False)),
    ("CANCELLED", True, CancelledTask("", "CANCELLED", False)),
]


@pytest.mark.parametrize(("status", "running", "expected"), CANCELS)
def test_a_cancel_says_what_it_met_and_whether_it_did_anything(
    connection: Connection[Any], status: str, running: bool, expected: CancelledTask
) -> None:
    task_id = row_in(connection, status)
    met = ask_to_cancel(connection, task_id, running=running)
    assert (met.id, met.was_status) == (task_id, expected.was_status)
    assert met.applied is expected.applied


def test_a_cancel_of_no_task_meets_nothing(connection: Connection[Any]) -> None:
    nobody = "00000000-0000-7000-8000-000000000000"
    assert cancel_tasks.fetch(connection, [nobody], True) == []


def test_expiry_takes_bounded_bites_earliest_deadline_first(connection: Connection[Any]) -> None:
    late = [
        add_task(connection, good_until=sql.SQL(f"now() - interval '{minutes} minutes'"))
        for minutes in (1, 3, 2)
    ]
    in_time = add_task(connection, good_until=FUTURE)
    first = expire_tasks.run(connection, ExpireTasks("{}", 2))
    assert {row.id for row in first} == {late[1], late[2]}
    second = expire_tasks.run(connection, ExpireTasks("{}", 2))
    assert [row.id for row in second] == [late[0]]
    assert row_of(connection, in_time)["status"] == "PENDING"


@pytest.fixture
def other(process_url: str) -> Iterator[Connection[Any]]:
    """A second connection, whose transaction stays open until the test ends it."""
    with psycopg.connect(process_url) as connection:
        yield connection


RACES = [
    (claim, "PENDING", "RUNNING", True),
    (complete, "RUNNING", "COMPLETED", False),
    (retry, "RUNNING", "PENDING", True),
    (release, "RUNNING", "PENDING", True),
]


@pytest.mark.parametrize(("winner", "status", "met_status", "applied"), RACES)
def test_a_cancel_that_had_to_wait_meets_what_the_winner_left(
    connection: Connection[Any],
    other: Connection[Any],
    process_url: str,
    winner: Callable[[Connection[Any], str], Any],
    status: str,
    met_status: str,
    applied: bool,
) -> None:
    task_id = row_in(connection, status)
    winner(other, task_id)
    answers: list[CancelledTask] = []
    with psycopg.connect(process_url, autocommit=True) as loser:
        thread = threading.Thread(target=lambda: answers.append(ask_to_cancel(loser, task_id)))
        thread.start()
        wait_until(lambda: lock_waiters(connection, loser.info.backend_pid))
        other.commit()
        thread.join()
    assert [(met.was_status, met.applied) for met in answers] == [(met_status, applied)]


@pytest.mark.parametrize("act", ENDS)
def test_an_outcome_that_had_to_wait_for_a_release_is_dropped(
    connection: Connection[Any],
    other: Connection[Any],
    process_url: str,
    act: Callable[..., list[FinishedTask]],
) -> None:
    task_id = row_in(connection, "RUNNING")
    release(other, task_id)
    answers: list[list[FinishedTask]] = []
    with psycopg.connect(process_url, autocommit=True) as loser:
        thread = threading.Thread(target=lambda: answers.append(act(loser, task_id)))
        thread.start()
        wait_until(lambda: lock_waiters(connection, loser.info.backend_pid))
        other.commit()
        thread.join()
    assert answers == [[]]
    assert row_of(connection, task_id)["status"] == "PENDING"
    assert attempts_of(connection, task_id) == []


def test_a_running_task_sends_one_heartbeat_per_call(connection: Connection[Any]) -> None:
    task_id = row_in(connection, "RUNNING")
    assert heartbeat(connection, task_id) == [FinishedTask(task_id)]
    assert heartbeat(connection, task_id) == [FinishedTask(task_id)]
    found = connection.execute("SELECT sender_id, role, pid FROM horsies_heartbeats").fetchall()
    assert found == [(OWNER, "runner", 4711)] * 2
