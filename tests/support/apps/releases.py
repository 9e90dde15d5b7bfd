"""Two releases of one application, for tests of deployments; the environment selects the release of a
process.

Release 2 adds tasks, a sub-workflow and parameters, makes a parameter optional and renames one; it drops a
task.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from horsies import Horsies, TaskError, TaskResult, WorkflowDefinition, WorkflowSpec
from horsies.workflow.nodes.nodes import SubWorkflowNode, TaskNode
from tests.support.apps.programs import read_config, rest, write_down

RELEASE_VARIABLE = "HORSIES_TEST_RELEASE"
RELEASE = int(os.environ.get(RELEASE_VARIABLE, "2"))

Done = TaskResult[int, TaskError]


def done(what: str, release: int, number: int, note: str = "") -> Done:
    write_down(what, f"{number} {note} by {release}")
    return TaskResult(ok=number)


def make(release: int) -> SimpleNamespace:
    """Return the application of a release, with its tasks."""
    app = Horsies(read_config())

    @app.task("shared")
    def shared(number: int) -> Done:
        return done("shared", release, number)

    own = first_tasks(app) if release == 1 else second_tasks(app)
    return SimpleNamespace(app=app, shared=shared, **own)


def first_tasks(app: Horsies) -> dict[str, Any]:
    @app.task("dropped")
    def dropped(number: int) -> Done:
        return done("dropped", 1, number)

    @app.task("extended")
    def extended(number: int) -> Done:
        return done("extended", 1, number)

    @app.task("loosened")
    def loosened(number: int, note: str) -> Done:
        return done("loosened", 1, number, note)

    @app.task("renamed")
    def renamed(old: int) -> Done:
        return done("renamed", 1, old)

    @app.task("burst_extended", burst=True)
    def burst_extended(number: int) -> Done:
        return TaskResult(ok=number)

    @app.task("async_extended")
    async def async_extended(number: int) -> Done:
        return TaskResult(ok=number)

    return {
        "dropped": dropped,
        "extended": extended,
        "loosened": loosened,
        "renamed": renamed,
        "burst_extended": burst_extended,
        "async_extended": async_extended,
    }


def second_tasks(app: Horsies) -> dict[str, Any]:
    @app.task("occupy")
    def occupy(seconds: float) -> TaskResult[str, TaskError]:
        return rest(seconds, "")

    @app.task("added")
    def added(number: int) -> Done:
        return done("added", 2, number)

    @app.task("extended")
    def extended(number: int, note: str = "new") -> Done:
        return done("extended", 2, number, note)

    @app.task("loosened")
    def loosened(number: int, note: str = "new") -> Done:
        return done("loosened", 2, number, note)

    @app.task("renamed")
    def renamed(new: int) -> Done:
        return done("renamed", 2, new)

    @app.task("burst_extended", burst=True)
    def burst_extended(number: int, note: str = "new") -> Done:
        return TaskResult(ok=number)

    @app.task("async_extended")
    async def async_extended(number: int, note: str = "new") -> Done:
        return TaskResult(ok=number)

    return {
        "added": added,
        "occupy": occupy,
        "extended": extended,
        "loosened": loosened,
        "renamed": renamed,
        "burst_extended": burst_extended,
        "async_extended": async_extended,
    }


tasks = make(RELEASE)
app = tasks.app


class Changed(WorkflowDefinition[int]):
    """A sub-workflow of both releases, with another parameter in the second release."""

    name = "changed"
    definition_key = "releases.changed"

    if RELEASE == 1:

        @classmethod
        def build_with(cls, app: Horsies, *, number: int) -> WorkflowSpec[int]:
            only = tasks.shared.node(node_id="only")(number=number)
            return app.workflow(cls.name, [only], output=only, definition_key=cls.definition_key)

    else:

        @classmethod
        def build_with(cls, app: Horsies, *, number: int, note: str = "") -> WorkflowSpec[int]:
            only = tasks.extended.node(node_id="only")(number=number, note=note)
            return app.workflow(cls.name, [only], output=only, definition_key=cls.definition_key)


if RELEASE == 2:

    class Fresh(WorkflowDefinition[int]):
        """A sub-workflow that the first release does not have."""

        name = "fresh"
        definition_key = "releases.fresh"

        @classmethod
        def build_with(cls, app: Horsies, *, number: int) -> WorkflowSpec[int]:
            only = tasks.added.node(node_id="only")(number=number)
            return app.workflow(cls.name, [only], output=only, definition_key=cls.definition_key)

    def new_workflow(number: int) -> Any:
        """Build a run with new tasks and sub-workflows next to old ones."""
        old = TaskNode(tasks.shared, kwargs={"number": number}, node_id="old")
        new = TaskNode(
            tasks.extended, kwargs={"number": number, "note": "n"}, waits_for=[old], node_id="new"
        )
        fresh = SubWorkflowNode(Fresh, kwargs={"number": number}, waits_for=[new], node_id="fresh")
        changed = SubWorkflowNode(
            Changed, kwargs={"number": number, "note": "c"}, waits_for=[fresh], node_id="changed"
        )
        nodes = [old, new, fresh, changed]
        return app.workflow("deployed", nodes, definition_key="releases.deployed")
