"""Refusals: records of the claimed tasks that this worker cannot call, so that workers with the same
parameters skip them.

If the table is locked, protected by a trigger or not accessible to the role, other tasks are not affected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import psycopg

from horsies.db.errors import lacks_right_on
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Step
from horsies.db.statements.refusals import (
    REFUSALS_TABLE,
    forget_refusals,
)
from horsies.db.statements.turn import ClaimedTask
from horsies.tasks.blocked import Blocked, Change
from horsies.tasks.outcome import Outcome
from horsies.worker.known_tasks import Uncalled, UnknownTasks

logger = logging.getLogger("horsies.worker")

_NO_RIGHT = (
    "this worker cannot note which calls do not fit its parameters: its role lacks a right; run as the owner "
    "GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO its role, docs/security.md lists all rights"
)


class Refusals:
    """Stores one worker's refusals."""

    def __init__(self, worker_id: str, unknown: UnknownTasks, blocked: Blocked) -> None:
        self._worker_id = worker_id
        self._unknown = unknown
        self._blocked = blocked
        self._has_named_right = False

    def store(self, pipeline: Pipeline, uncalled: Uncalled) -> set[str]:
        """Store the refusal of these tasks. Return the tasks to leave to other workers; the remaining
        tasks fail.

        A task whose refusal cannot be stored is left to other workers too. Until the next attempt to
        store it, only this worker excludes the task from its claims.
        """
        stored = self._run_each(pipeline, uncalled, self._refusing_steps)
        refused = [one for answers in stored for one in answers[-2]]
        takers = [one for answers in stored for one in answers[-1]]
        left = self._unknown.left(uncalled, refused, takers, time.monotonic())
        if failing := [one for one in uncalled if one[0].id not in left]:
            self._run_each(pipeline, failing, self._forgetting_steps)
            left |= {task.id for task, _ in failing if self._blocked.is_waiting(task.id)}
        return left

    def _refusing_steps(self, uncalled: Uncalled) -> list[Step]:
        return [self._blocked.lock_wait(), *self._unknown.refusal(self._worker_id, uncalled)]

    def _forgetting_steps(self, failing: Uncalled) -> list[Step]:
        return [self._blocked.lock_wait(), forget_refusals([task.id for task, _ in failing])]

    def _run_each(
        self, pipeline: Pipeline, uncalled: Uncalled, steps_of: Callable[[Uncalled], list[Step]]
    ) -> list[list[list[Any]]]:
        """Run these steps for the tasks, and return the results of each transaction; no results if the role
        lacks the privilege.
        """
        blocked = self._blocked
        try:
            return blocked.run_each(pipeline, uncalled, _reassignment, steps_of)
        except psycopg.Error as error:
            if not lacks_right_on(error, REFUSALS_TABLE):
                raise
            if not self._has_named_right:
                self._has_named_right = True
                logger.error(_NO_RIGHT, REFUSALS_TABLE)
            with blocked.search(pipeline):
                for one in uncalled:
                    blocked.note(pipeline, _reassignment(one), error)
            return []


def _reassignment(uncalled: tuple[ClaimedTask, Outcome]) -> Change:
    """Return the change that leaves a task to workers of another release."""
    task, _ = uncalled
    return Change("reassign", task.id, task.workflow_id)
