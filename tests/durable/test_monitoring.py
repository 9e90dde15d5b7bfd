"""Parked and held runs in `horsies doctor` and in the metrics."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from horsies import Durable, Horsies, TaskHandle
from horsies.db.statements.durable import HeldRun
from horsies.findings import Finding, Level
from horsies.monitor.diagnose.doctor import run_doctor
from horsies.monitor.diagnose.work import judge_held_runs
from horsies.monitor.metrics import ClusterGauges, exposition
from horsies.tasks.broker import BrokerErrorCode
from horsies.testing import clock_of, run_pending
from tests.support.command_line import Run
from tests.support.durable_runs import Effects

DAY = timedelta(days=1)


class Release:
    """A durable function whose step can be renamed, as a deployment does."""

    def __init__(self, app: Horsies, effects: Effects) -> None:
        self.app, self.step_name = app, "former"

        @app.durable("talk")
        def talk(ctx: Durable) -> str:
            ctx.with_options(name=self.step_name).step(effects.note, "step")
            ctx.sleep(DAY)
            ctx.with_options(name="second").step(effects.note, "second")
            return str(ctx.wait_signal("go"))

        self.talk = talk

    def held(self) -> TaskHandle[str]:
        """A run that was parked when its code changed."""
        self.step_name = "former"
        sent = self.talk.enqueue()
        run_pending(self.app)
        self.step_name = "renamed"
        clock_of(self.app).advance(2 * DAY)
        run_pending(self.app)
        return sent

    def parked(self) -> TaskHandle[str]:
        self.step_name = "former"
        sent = self.talk.enqueue()
        run_pending(self.app)
        return sent


@pytest.fixture
def release(app: Horsies, effects: Effects) -> Release:
    return Release(app, effects)


def findings(app: Horsies) -> list[Finding]:
    (report,) = run_doctor(app.get_broker(), ["held-runs"]).unwrap()
    return list(report.findings)


def test_the_doctor_names_held_runs_until_they_continue(
    app: Horsies, release: Release, horsies: Run
) -> None:
    waiting = release.parked()
    assert findings(app) == [], "a run that waits is healthy"
    waiting.cancel().unwrap()
    sent = release.held()
    (found,) = findings(app)
    assert found.code == "HELD_BY_RECORD"
    assert found.sentence == (
        "The code of 1 run(s) of durable functions does not fit their record."
    )
    assert found.subject.key == sent.task_id
    (evidence,) = found.evidence
    assert evidence.startswith(f"talk {sent.task_id}: DURABLE_MISMATCH: the code asks for step")
    assert found.since is not None
    assert found.remedy is not None
    shown = horsies(*shlex.split(found.remedy)[1:])
    assert (shown.code, "DURABLE_MISMATCH" in shown.out) == (0, True)
    release.step_name = "former"
    app.durable_handle(sent.task_id).resume().unwrap()
    run_pending(app)
    assert findings(app) == []


def test_a_finding_counts_all_held_runs_and_shows_the_first() -> None:
    since = datetime(2026, 11, 1, tzinfo=UTC)
    held = [HeldRun(f"id-{number}", "talk", "no fit", since, 1_200) for number in range(3)]
    (found,) = judge_held_runs(held)
    assert found.sentence.startswith("The code of 1,200 run(s)")
    assert (found.since, found.subject.key) == (since, "id-0")
    assert found.evidence == tuple(f"talk id-{number}: no fit" for number in range(3))
    assert found.remedy is not None
    assert "durable show id-0" in found.remedy
    assert found.level in (Level.RED, Level.YELLOW)
    assert list(judge_held_runs([])) == []


def metric(app: Horsies) -> dict[str, float]:
    """The values of horsies_durable_runs by state, as a scraper reads them."""
    gauges = ClusterGauges("public")
    app.get_broker().perform(BrokerErrorCode.MONITORING_QUERY_FAILED, gauges.script()).unwrap()
    lines = exposition(gauges.samples())[0].decode().splitlines()
    states = partial('horsies_durable_runs{{state="{}"}} '.format)
    return {
        state: float(line.removeprefix(states(state)))
        for state in ("parked", "held")
        for line in lines
        if line.startswith(states(state))
    }


def test_the_metric_counts_parked_and_held_runs(app: Horsies, release: Release) -> None:
    assert metric(app) == {"parked": 0, "held": 0}
    first = release.held()
    second, third = release.parked(), release.parked()
    assert metric(app) == {"parked": 2, "held": 1}
    second.cancel().unwrap()
    assert metric(app) == {"parked": 1, "held": 1}
    app.durable_handle(first.task_id).resume().unwrap()
    run_pending(app)
    assert metric(app) == {"parked": 2, "held": 0}
    clock_of(app).advance(2 * DAY)
    for one in (first, third):
        app.signal(one.task_id, "go", "gone").unwrap()
    run_pending(app)
    assert metric(app) == {"parked": 0, "held": 0}
