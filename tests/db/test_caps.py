"""Caps: how many tasks may be in flight, counted and claimed in one step however many claim at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.db.statements.turn import (
    ClaimedTask,
    ClaimTasks,
    CompleteTasks,
    ReleaseClaimed,
    ReleaseLapsed,
    RenewClaims,
    StartTasks,
    claim_tasks,
    complete_tasks,
    release_claimed,
    release_lapsed,
    renew_claims,
    start_tasks,
)
from tests.support.rows import add_task, attempts_of, picture, row_of

CAP_LOCKS = 1751348595
LAPSED = sql.SQL("now() - interval '1 second'")
VALID = sql.SQL("now() + interval '1 minute'")


def claim(
    connection: Connection[Any],
    children: int = 9,
    queues: Sequence[str] = ("default",),
    caps: Sequence[int | None] = (),
    cluster_cap: int | None = None,
    worker_id: str = "worker-1",
    **more: Any,
) -> list[ClaimedTask]:
    """Claim for so many idle children under these caps."""
    pids = list(range(1, children + 1))
    limits = [children + more.get("prefetch", 0)] * len(queues)
    wanted = ClaimTasks(
        worker_id,
        "host",
        pids,
        list(queues),
        limits,
        queue_caps=list(caps),
        cluster_cap=cluster_cap,
        **more,
    )
    return claim_tasks.run(connection, wanted)


def add_tasks(connection: Connection[Any], count: int, **columns: Any) -> list[str]:
    return [add_task(connection, **columns) for _ in range(count)]


def add_claimed(connection: Connection[Any], expires: sql.SQL, **columns: Any) -> str:
    """Insert a task that another worker has claimed ahead."""
    return add_task(
        connection,
        status="CLAIMED",
        claimed=True,
        generation=1,
        claimed_by_worker_id="other",
        claimed_at=sql.SQL("now()"),
        claim_expires_at=expires,
        **columns,
    )


def add_running(connection: Connection[Any], **columns: Any) -> str:
    """Insert a task that another worker runs."""
    values = {"status": "RUNNING", "generation": 1, "claimed_by_worker_id": "other", **columns}
    return add_task(connection, **values)


def queues_of(claimed: Sequence[ClaimedTask]) -> Counter[str]:
    return Counter(task.queue_name for task in claimed)


@pytest.mark.parametrize("in_flight", [3, 4], ids=["full", "more than full"])
def test_a_full_cluster_gives_nothing(connection: Connection[Any], in_flight: int) -> None:
    for _ in range(in_flight):
        add_running(connection, queue_name="elsewhere")
    (task_id,) = add_tasks(connection, 1)
    before = picture(connection, task_id)
    assert claim(connection, cluster_cap=3) == []
    assert picture(connection, task_id) == before


def test_the_cluster_cap_counts_what_runs_and_what_is_claimed_in_any_queue(
    connection: Connection[Any],
) -> None:
    add_running(connection, queue_name="elsewhere")
    add_claimed(connection, VALID, queue_name="elsewhere")
    add_tasks(connection, 9)
    assert len(claim(connection, cluster_cap=5)) == 3


def test_the_cluster_cap_spans_the_queues_of_one_claim(connection: Connection[Any]) -> None:
    for queue in ("first", "second"):
        add_tasks(connection, 4, queue_name=queue)
    claimed = claim(connection, queues=["first", "second"], caps=[3, None], cluster_cap=5)
    assert queues_of(claimed) == {"first": 3, "second": 2}


def test_a_queue_cap_counts_its_own_queue_only(connection: Connection[Any]) -> None:
    add_running(connection, queue_name="first")
    add_running(connection, queue_name="second")
    for queue in ("first", "second", "free"):
        add_tasks(connection, 3, queue_name=queue)
    claimed = claim(connection, queues=["first", "second", "free"], caps=[2, 1, None])
    assert queues_of(claimed) == {"first": 1, "free": 3}


def test_a_cap_of_zero_pauses_a_queue(connection: Connection[Any]) -> None:
    add_tasks(connection, 2, queue_name="stopped")
    assert claim(connection, queues=["stopped"], caps=[0]) == []


@pytest.mark.parametrize(("counts_claimed", "expected"), [(True, 1), (False, 2)])
def test_a_hard_cap_counts_claimed_tasks_and_a_soft_one_does_not(
    connection: Connection[Any], counts_claimed: bool, expected: int
) -> None:
    add_running(connection)
    add_claimed(connection, VALID)
    add_tasks(connection, 5)
    assert len(claim(connection, caps=[3], counts_claimed=counts_claimed)) == expected


@pytest.mark.parametrize("caps", [{"caps": [1]}, {"cluster_cap": 1}], ids=["queue", "cluster"])
def test_a_lapsed_claim_holds_no_place(connection: Connection[Any], caps: dict[str, Any]) -> None:
    add_claimed(connection, LAPSED)
    add_tasks(connection, 2)
    assert len(claim(connection, **caps)) == 1


def test_a_paused_queue_gives_nothing_until_it_is_resumed(connection: Connection[Any]) -> None:
    add_tasks(connection, 1, queue_name="calm")
    add_tasks(connection, 1, queue_name="busy")
    connection.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('calm', now()), ('busy', NULL)"
    )
    assert queues_of(claim(connection, queues=["calm", "busy"])) == {"busy": 1}
    connection.execute("UPDATE horsies_queues SET paused_at = NULL")
    assert queues_of(claim(connection, queues=["calm", "busy"])) == {"calm": 1}


@pytest.mark.parametrize(
    ("caps", "keys"),
    [
        pytest.param({}, 0, id="no caps"),
        pytest.param({"caps": [None, None]}, 0, id="uncapped queues"),
        pytest.param({"caps": [3, None]}, 1, id="one capped queue"),
        pytest.param({"caps": [3, 1]}, 2, id="two capped queues"),
        pytest.param({"caps": [3, 1], "cluster_cap": 5}, 1, id="a cluster cap"),
    ],
)
def test_a_claim_locks_what_it_must_count_and_nothing_else(
    connection: Connection[Any], process_url: str, caps: dict[str, Any], keys: int
) -> None:
    for queue in ("first", "second"):
        add_tasks(connection, 2, queue_name=queue)
    with psycopg.connect(process_url) as claimer:
        assert claim(claimer, queues=["first", "second"], **caps)
        assert held_cap_locks(connection, claimer.info.backend_pid) == keys
        claimer.commit()
        assert held_cap_locks(connection, claimer.info.backend_pid) == 0


def held_cap_locks(connection: Connection[Any], backend_pid: int) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s AND classid = %s",
        (backend_pid, CAP_LOCKS),
    ).fetchone()
    assert row is not None
    return int(row[0])


def test_claimers_of_other_queues_do_not_wait_for_each_other(
    connection: Connection[Any], process_url: str
) -> None:
    for queue in ("first", "second"):
        add_tasks(connection, 2, queue_name=queue)
    with psycopg.connect(process_url) as other:
        assert claim(other, queues=["first"], caps=[1])
        connection.execute("SET lock_timeout = '2s'")
        assert len(claim(connection, queues=["second"], caps=[1])) == 1
        with pytest.raises(psycopg.errors.LockNotAvailable):
            claim(connection, queues=["first"], caps=[1])


def test_concurrent_claimers_never_exceed_the_caps_at_any_instant(
    connection: Connection[Any], process_url: str
) -> None:
    caps: dict[str, int] = {"first": 3, "second": 1}
    for queue in caps:
        add_tasks(connection, 60, queue_name=queue)
    seen: Counter[str] = Counter()
    finished: list[str] = []
    start = threading.Barrier(5)
    working = 4
    done = threading.Event()

    def work(worker_id: str) -> None:
        with psycopg.connect(process_url, autocommit=True) as mine:
            start.wait()
            while len(finished) < 120 and not done.is_set():
                batch = claim(mine, 4, list(caps), list(caps.values()), 3, worker_id)
                for task in batch:
                    report = CompleteTasks(worker_id, [task.id], [task.generation], ["null"])
                    finished.extend(row.task_id for row in complete_tasks.run(mine, report))

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(working)]
    for thread in threads:
        thread.start()
    start.wait()
    try:
        while any(thread.is_alive() for thread in threads):
            sample(connection, seen)
    finally:
        done.set()
    assert len(finished) == len(set(finished)) == 120
    assert seen["all"] <= 3
    assert seen["second"] <= 1
    assert seen["all"] > 1, "nothing ever ran side by side: the samples prove nothing"


def sample(connection: Connection[Any], seen: Counter[str]) -> None:
    """Keep the largest numbers of tasks in flight."""
    rows = connection.execute(
        "SELECT coalesce(queue_name, 'all'), count(*) FROM horsies_tasks "
        "WHERE status IN ('CLAIMED', 'RUNNING') GROUP BY ROLLUP (queue_name)"
    )
    for queue, number in rows:
        seen[queue] = max(seen[queue], number)


@pytest.mark.parametrize(
    ("caps", "freed", "children", "expected"),
    [
        pytest.param({"caps": [1]}, 1, 0, ["task_queue_default"], id="a place left free"),
        pytest.param({"cluster_cap": 1}, 1, 0, ["task_queue_default"], id="of the cluster"),
        pytest.param({"caps": [1]}, 1, 1, [], id="taken again at once"),
        pytest.param({"caps": [None]}, 1, 0, [], id="nobody is turned away without a cap"),
        pytest.param({"caps": [1]}, 0, 0, [], id="nothing was freed"),
    ],
)
def test_a_freed_place_that_is_not_taken_again_wakes_others(
    connection: Connection[Any],
    process_url: str,
    caps: dict[str, Any],
    freed: int,
    children: int,
    expected: list[str],
) -> None:
    add_tasks(connection, 2)
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN task_queue_default")
        claim(connection, children, freed=[freed], **caps)
        connection.execute("NOTIFY task_queue_default, 'last'")
        heard = list(listener.notifies(timeout=30, stop_after=len(expected) + 1))
    assert [note.channel for note in heard if note.payload == ""] == expected


# Claimed ahead


def test_what_is_claimed_ahead_rests_under_a_lease(connection: Connection[Any]) -> None:
    first, second = add_tasks(connection, 2)
    claimed = claim(connection, 1, prefetch=1, lease_ms=5_000)
    assert [(task.id, task.worker_pid) for task in claimed] == [(first, 1), (second, None)]
    row = row_of(connection, second)
    assert (row["status"], row["claimed"], row["generation"]) == ("CLAIMED", True, 1)
    assert (row["started_at"], row["worker_pid"]) == (None, None)
    lease = connection.execute(
        "SELECT extract(epoch FROM claim_expires_at - claimed_at) FROM horsies_tasks WHERE id = %s",
        (second,),
    ).fetchone()
    assert lease is not None
    assert 4.9 < float(lease[0]) < 5.1
    assert row_of(connection, first)["claim_expires_at"] is None


def start(
    connection: Connection[Any], task_id: str, worker_id: str = "other", generation: int = 1
) -> list[tuple[str, int]]:
    wanted = StartTasks(worker_id, [task_id], [generation], [77])
    return [(row.id, row.worker_pid) for row in start_tasks.run(connection, wanted)]


def test_a_task_claimed_ahead_starts_for_its_owner(connection: Connection[Any]) -> None:
    task_id = add_claimed(connection, VALID)
    assert start(connection, task_id) == [(task_id, 77)]
    row = row_of(connection, task_id)
    assert (row["status"], row["claimed"], row["claim_expires_at"]) == ("RUNNING", False, None)
    assert (row["worker_pid"], row["worker_process_name"]) == (77, "worker-77")
    assert row["started_at"] is not None


@pytest.mark.parametrize(
    ("expires", "columns", "owner", "generation"),
    [
        pytest.param(LAPSED, {}, "other", 1, id="lease over"),
        pytest.param(VALID, {}, "worker-1", 1, id="another owner"),
        pytest.param(VALID, {}, "other", 2, id="another generation"),
        pytest.param(VALID, {"good_until": LAPSED}, "other", 1, id="expired"),
    ],
)
def test_what_is_lost_or_too_late_does_not_start(
    connection: Connection[Any],
    expires: sql.SQL,
    columns: dict[str, Any],
    owner: str,
    generation: int,
) -> None:
    task_id = add_claimed(connection, expires, **columns)
    before = picture(connection, task_id)
    assert start(connection, task_id, owner, generation) == []
    assert picture(connection, task_id) == before


def renew(connection: Connection[Any], task_id: str, owner: str = "other", **more: int) -> int:
    values = {"generation": 1, "lease_ms": 600_000, "max_age_ms": 180_000, **more}
    lease = RenewClaims(
        owner, [task_id], [values["generation"]], values["lease_ms"], values["max_age_ms"]
    )
    return len(renew_claims.run(connection, lease))


@pytest.mark.parametrize("expires", [VALID, LAPSED], ids=["valid", "lapsed but not taken"])
def test_a_renewed_lease_lasts_longer(connection: Connection[Any], expires: sql.SQL) -> None:
    task_id = add_claimed(connection, expires)
    assert renew(connection, task_id) == 1
    assert release_lapsed.run(connection, ReleaseLapsed(10)) == []
    assert start(connection, task_id)


def test_only_the_owner_renews_and_not_for_ever(connection: Connection[Any]) -> None:
    task_id = add_claimed(connection, VALID)
    before = picture(connection, task_id)
    assert renew(connection, task_id, "worker-1") == 0
    assert renew(connection, task_id, generation=2) == 0
    assert renew(connection, task_id, max_age_ms=0) == 0
    running = add_running(connection)
    assert renew(connection, running) == 0
    assert picture(connection, task_id) == before


def test_lapsed_claims_go_back_and_valid_ones_stay(connection: Connection[Any]) -> None:
    lapsed = [add_claimed(connection, LAPSED) for _ in range(3)]
    kept = [add_claimed(connection, VALID), add_running(connection)]
    before = [picture(connection, task_id) for task_id in kept]
    assert len(release_lapsed.run(connection, ReleaseLapsed(2))) == 2
    assert len(release_lapsed.run(connection, ReleaseLapsed(2))) == 1
    for task_id in lapsed:
        row = row_of(connection, task_id)
        assert (row["status"], row["claimed"], row["claim_expires_at"]) == ("PENDING", False, None)
        assert (row["claimed_by_worker_id"], row["retry_count"], row["generation"]) == (None, 0, 1)
        assert attempts_of(connection, task_id) == []
    assert [picture(connection, task_id) for task_id in kept] == before


def test_a_lapsed_claim_that_was_taken_again_does_not_start_for_the_first_owner(
    connection: Connection[Any],
) -> None:
    task_id = add_claimed(connection, LAPSED)
    release_lapsed.run(connection, ReleaseLapsed(1))
    assert [task.generation for task in claim(connection, 1)] == [2]
    before = picture(connection, task_id)
    assert start(connection, task_id) == []
    assert renew(connection, task_id) == 0
    assert picture(connection, task_id) == before


def test_claims_of_the_dead_are_given_back_only_as_they_were_seen(
    connection: Connection[Any],
) -> None:
    task_id, running = add_claimed(connection, VALID), add_running(connection)
    before = [picture(connection, one) for one in (task_id, running)]
    for worker_id, generations in (("worker-1", [1, 1]), ("other", [2, 2])):
        asked = ReleaseClaimed(worker_id, [task_id, running], generations)
        assert release_claimed.run(connection, asked) == []
    assert [picture(connection, one) for one in (task_id, running)] == before
    asked = ReleaseClaimed("other", [task_id, running], [1, 1])
    assert [row.id for row in release_claimed.run(connection, asked)] == [task_id]
    assert row_of(connection, task_id)["status"] == "PENDING"
    assert picture(connection, running) == before[1]
