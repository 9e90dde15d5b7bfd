"""Tasks that fail in every possible way and put their argument into the exception, the result or the
log.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from horsies import (
    Durable,
    FernetCodec,
    Horsies,
    MapNode,
    RetryLater,
    RetryPolicy,
    SubWorkflowNode,
    TaskError,
    TaskFailed,
    TaskNode,
    TaskResult,
    TaskTransaction,
    WorkflowSpec,
)
from horsies.workflow.definition import WorkflowDefinition
from tests.support.apps.programs import read_config

KEYS_VARIABLE = "HORSIES_TEST_KEYS"
logger = logging.getLogger("careless")
ONCE_MORE = RetryPolicy.fixed([0.01], auto_retry_for=["UNHANDLED_EXCEPTION"], jitter=False)
# The tasks that take one text and fail.
FAILING = (
    *("raise_group", "return_wrong_type", "return_unwritable", "return_error", "leave", "postpone"),
    *("fail_later", "fail_async", "log_and_die", "overrun", "break_commit", "break_statement"),
)
FAILING_RUNS = ("fail_in_step", "continue_wrongly", "clean_up_badly")


class Talkative:
    """A value that cannot be stored, and whose repr() contains the argument."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Talkative({self.name})"


def make(keys: Sequence[str], **changes: Any) -> Horsies:
    """Return an application with these keys, or without a codec; ``changes`` override fields of its
    PostgresConfig.
    """
    config = read_config()
    codec = FernetCodec(keys) if keys else None
    broker = config.broker.model_copy(update={"codec": codec, **changes})
    app = Horsies(config.model_copy(update={"broker": broker}))
    for add in (_add_raising, _add_returning, _add_dying, _add_transactions, _add_durable):
        add(app)
    return app


def _add_raising(app: Horsies) -> None:
    @app.task("raise_group", retry_policy=ONCE_MORE)
    def raise_group(name: str) -> str:
        try:
            raise KeyError(name)
        except KeyError as error:
            raise ExceptionGroup(name, [ValueError(name), TypeError(Talkative(name))]) from error

    @app.task("postpone")
    def postpone(name: str) -> str:
        raise RetryLater(0.01, f"{name} is out")

    @app.task("fail_later", retry_policy=ONCE_MORE, default_unhandled_error_code="LATER")
    def fail_later(name: str) -> str:
        logger.exception("about %s", name, exc_info=ValueError(name))
        raise TaskFailed("NESTED", name, data={name: [{"deep": name}]}) from ValueError(name)

    @app.task("fail_async")
    async def fail_async(name: str) -> str:
        raise LookupError(name)


def _add_returning(app: Horsies) -> None:
    @app.task("return_wrong_type")
    def return_wrong_type(name: str) -> int:
        answer: Any = f"not a number: {name}"
        return answer  # type: ignore[no-any-return]

    @app.task("return_unwritable")
    def return_unwritable(name: str) -> dict[str, Any]:
        return {name: Talkative(name)}

    @app.task("return_error")
    def return_error(name: str) -> TaskResult[str, TaskError]:
        return TaskResult(
            err=TaskError(
                error_code="REFUSED", message=name, data=[name], exception=ValueError(name)
            )
        )

    @app.task("take_error")
    def take_error(before: TaskResult[str, TaskError]) -> str:
        raise ValueError(f"after {before.err_value.message}")

    @app.task("names")
    def names(name: str) -> list[str]:
        return [f"{name}-{number}" for number in range(2)]


def _add_dying(app: Horsies) -> None:
    @app.task("leave")
    def leave(name: str) -> str:
        raise SystemExit(name)

    @app.task("log_and_die")
    def log_and_die(name: str) -> str:
        logger.warning("%s dies", name)
        os.kill(os.getpid(), signal.SIGKILL)
        return name

    @app.task("overrun", timeout_ms=500)
    def overrun(name: str) -> str:
        logger.warning("%s waits", name)
        time.sleep(60)
        return name


def _add_transactions(app: Horsies) -> None:
    @app.task("break_commit")
    def break_commit(name: str, tx: TaskTransaction) -> str:
        """Violate a constraint that is checked at COMMIT. The server concatenates the value, so that
        only the server's message quotes the whole value.
        """
        tx.connection.execute(
            "CREATE TEMP TABLE careless (name text UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP"
        )
        insert = "INSERT INTO careless SELECT %s::text || %s FROM generate_series(1, 2)"
        tx.connection.execute(insert, [name[:2], name[2:]])
        return name

    @app.task("break_statement")
    def break_statement(name: str, tx: TaskTransaction) -> str:
        tx.connection.execute("SELECT (%s::text || %s)::integer", [name[:2], name[2:]])
        return name


def failing(name: str) -> str:
    raise ValueError(f"bad step {name}")


def kept(name: str) -> str:
    return name


def _add_durable(app: Horsies) -> None:
    @app.durable("fail_in_step")
    def fail_in_step(ctx: Durable, name: str) -> str:
        ctx.step(kept, name)
        return str(ctx.step(failing, name))

    @app.durable("continue_wrongly")
    def continue_wrongly(ctx: Durable, name: str) -> str:
        ctx.step(kept, name)
        ctx.continue_as([name], name)
        return name

    @app.durable("clean_up_badly")
    def clean_up_badly(ctx: Durable, name: str) -> str:
        ctx.on_cancel(failing, name)
        return ctx.wait_signal("word", str)


class Inner(WorkflowDefinition[str]):
    """A sub-workflow that fails."""

    name = "careless-inner"
    definition_key = "e2e.careless.inner"

    @classmethod
    def build_with(cls, app: Horsies, *, name: str) -> WorkflowSpec[str]:
        node: Any = TaskNode(app.get_task("raise_group"), kwargs={"name": name})  # type: ignore[arg-type]
        return app.workflow(cls.name, [node], output=node, definition_key=cls.definition_key)


def graph(app: Horsies, name: str) -> Any:
    """Build a run with failing nodes: a task, a sub-workflow, the items of a map, and a node that takes
    an error.
    """
    task: Any = app.get_task
    names = TaskNode(task("names"), kwargs={"name": name})
    items = MapNode(task("fail_async"), over=names, each="name")
    inner = SubWorkflowNode(Inner, kwargs={"name": name})
    broken = TaskNode(task("return_error"), kwargs={"name": name})
    after = TaskNode(
        task("take_error"),
        args_from={"before": broken},
        waits_for=[broken],
        allow_failed_deps=True,
    )
    nodes: list[Any] = [names, items, inner, broken, after]
    return app.workflow("careless", nodes, definition_key="e2e.careless")


app = make([key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key])
