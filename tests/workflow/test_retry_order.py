"""Retried nodes: each at its position, after the retried nodes before it."""

from __future__ import annotations

from tests.support.oracle.compare import Duet, status_of, statuses
from tests.support.oracle.shapes import NodeShape, RunShape, chain

AFTER_FAILURE = NodeShape(after=(0,), allow_failed_deps=True)
PAUSING = RunShape((NodeShape(),), on_error="pause")


def newest(duet: Duet) -> str:
    return list(duet.oracle.runs)[-1]


def test_a_node_waits_for_the_failed_node_before_it_when_both_are_tried_again(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), AFTER_FAILURE)))
    duet.fail((run, 0, None))
    duet.fail((run, 1, None))
    assert duet.retry(run) == "retried"
    assert statuses(duet, run) == ["ENQUEUED", "PENDING"]
    duet.succeed((run, 0, None))
    duet.succeed((run, 1, None))
    assert status_of(duet, run) == "COMPLETED"


def test_a_node_that_is_tried_again_alone_begins_at_once(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), AFTER_FAILURE)))
    duet.fail((run, 0, None))
    duet.fail((run, 1, None))
    assert duet.retry(run, [1]) == "retried"
    assert statuses(duet, run) == ["FAILED", "ENQUEUED"]


def test_resuming_with_failures_tried_again_keeps_the_order_as_well(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(optional=True), AFTER_FAILURE), on_error="pause"))
    duet.fail((run, 0, None))
    duet.fail((run, 1, None))
    assert status_of(duet, run) == "PAUSED"
    duet.resume_retrying(run)
    assert statuses(duet, run) == ["ENQUEUED", "PENDING"]


def test_a_map_waits_for_its_list_when_both_are_tried_again(duet: Duet) -> None:
    mapped = NodeShape(kind="map", after=(0,), over=0, allow_failed_deps=True)
    run = duet.start_one(RunShape((NodeShape(), mapped)))
    duet.fail((run, 0, None))
    assert statuses(duet, run) == ["FAILED", "FAILED"]
    assert duet.retry(run) == "retried"
    assert statuses(duet, run) == ["ENQUEUED", "PENDING"]
    duet.succeed((run, 0, None), value=[1])
    duet.succeed((run, 1, 0))
    assert status_of(duet, run) == "COMPLETED"


def test_failed_items_wait_for_what_is_tried_again_before_their_map(duet: Duet) -> None:
    mapped = NodeShape(kind="map", after=(0, 1), over=0, allow_failed_deps=True)
    run = duet.start_one(RunShape((NodeShape(), NodeShape(), mapped)))
    duet.fail((run, 1, None))
    duet.succeed((run, 0, None), value=[1, 2])
    duet.succeed((run, 2, 0))
    duet.fail((run, 2, 1))
    assert duet.retry(run) == "retried"
    assert statuses(duet, run) == ["COMPLETED", "ENQUEUED", "PENDING"]
    duet.succeed((run, 1, None))
    assert duet.claimable() == [(run, 2, 1)]
    duet.succeed((run, 2, 1))
    assert status_of(duet, run) == "COMPLETED"


def test_a_sub_workflow_that_has_to_wait_begins_with_a_new_run(duet: Duet) -> None:
    below = NodeShape(kind="workflow", after=(0,), allow_failed_deps=True, child=chain(1))
    run = duet.start_one(RunShape((NodeShape(), below)))
    duet.fail((run, 0, None))
    duet.succeed((run, 1, None))
    first = newest(duet)
    duet.fail((first, 0, None))
    assert duet.retry(run) == "retried"
    assert statuses(duet, run) == ["ENQUEUED", "PENDING"]
    assert status_of(duet, first) == "FAILED"
    duet.succeed((run, 0, None))
    duet.succeed((run, 1, None))
    assert newest(duet) != first
    duet.succeed((newest(duet), 0, None))
    assert status_of(duet, run) == "COMPLETED"


def test_what_a_failure_let_into_the_queue_waits_for_the_node_that_is_tried_again(
    duet: Duet,
) -> None:
    run = duet.start_one(RunShape((NodeShape(), AFTER_FAILURE)))
    duet.fail((run, 0, None))
    assert statuses(duet, run) == ["FAILED", "ENQUEUED"]
    assert duet.retry(run) == "retried"
    assert statuses(duet, run) == ["ENQUEUED", "PENDING"]
    assert duet.claimable() == [(run, 0, None)]
    duet.succeed((run, 0, None))
    duet.succeed((run, 1, None))
    assert status_of(duet, run) == "COMPLETED"


def test_what_has_begun_after_a_failure_goes_on_while_the_node_is_tried_again(duet: Duet) -> None:
    run = duet.start_one(RunShape((NodeShape(), AFTER_FAILURE)))
    duet.fail((run, 0, None))
    duet.claim([(run, 1, None)])
    assert duet.retry(run) == "retried"
    assert statuses(duet, run) == ["ENQUEUED", "ENQUEUED"]
    duet.finish(duet.success((run, 1, None)))
    duet.succeed((run, 0, None))
    assert status_of(duet, run) == "COMPLETED"


def test_a_retry_leaves_runs_below_paused_that_a_failure_of_their_own_has_paused(
    duet: Duet,
) -> None:
    below = NodeShape(kind="workflow", child=PAUSING)
    run = duet.start_one(RunShape((NodeShape(), below), on_error="pause"))
    duet.succeed((run, 1, None))
    child = newest(duet)
    duet.fail((child, 0, None))
    duet.check()
    duet.fail((run, 0, None))
    duet.check()
    assert duet.retry(run, [0]) == "retried"
    assert (status_of(duet, run), status_of(duet, child)) == ("RUNNING", "PAUSED")
    assert statuses(duet, run) == ["ENQUEUED", "RUNNING"]
    assert duet.retry(child) == "retried"
    duet.succeed((child, 0, None))
    duet.succeed((run, 0, None))
    assert status_of(duet, run) == "COMPLETED"


def test_what_an_expired_run_left_behind_does_not_go_on_with_those_above(duet: Duet) -> None:
    middle = RunShape((NodeShape(kind="workflow", child=chain(1)),))
    run = duet.start_one(RunShape((NodeShape(kind="workflow", child=middle), NodeShape())))
    duet.succeed((run, 0, None))
    expired = newest(duet)
    duet.succeed((expired, 0, None))
    left_behind = newest(duet)
    duet.pause(expired)
    duet.expire(expired)
    duet.pause(run)
    duet.resume(run)
    assert (status_of(duet, expired), status_of(duet, left_behind)) == ("EXPIRED", "PAUSED")
    assert duet.claimable() == [(run, 1, None)]
    duet.cancel(run)
    assert status_of(duet, left_behind) == "CANCELLED"
