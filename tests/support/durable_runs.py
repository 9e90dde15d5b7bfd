"""Runs of durable functions: their workers, and the calls of their step functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from horsies import TaskHandle, TaskInfo
from tests.support.workers import QUICK_RECOVERY, Fleet, RunningWorker

APPLICATION = "tests.support.apps.durable:app"


# The row of a step must be written only once and stay, because a change would be one of the past of a run.
# Only ctx.continue_as deletes steps, in the park of its run.
WITNESS = """
CREATE TABLE durable_effects (task_id uuid, number integer);
CREATE FUNCTION e2e_unchanged() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stack text;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF TG_OP = 'DELETE' AND stack LIKE '%horsies_park_v1%' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'a recorded step was changed: %', TG_OP;
END $$;
CREATE TRIGGER e2e_unchanged BEFORE UPDATE OR DELETE ON horsies_steps
    FOR EACH ROW EXECUTE FUNCTION e2e_unchanged();
"""


def start(fleet: Fleet, *options: str, processes: int = 2) -> RunningWorker:
    return fleet.start(
        *options, application=APPLICATION, processes=processes, config=QUICK_RECOVERY
    )


def journal_of(fleet: Fleet) -> dict[str, Counter[tuple[str, str]]]:
    """Return the calls of step functions by run, with the count of each token."""
    path = fleet.journal.path
    made: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for line in path.read_text().splitlines() if path.exists() else []:
        task_id, step, token = line.split()
        made[task_id][step, token] += 1
    return made


def info_of(sent: TaskHandle[Any]) -> TaskInfo:
    """Return the current state of a run's task."""
    found = sent.info().unwrap()
    assert found is not None
    return found


class Effects(Counter[str]):
    """Counts how often each effect happened outside the database."""

    def note(self, what: str) -> str:
        self[what] += 1
        return what
