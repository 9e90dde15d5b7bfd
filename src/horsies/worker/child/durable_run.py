"""A call of a durable function in its child: reads the recorded steps before the call, and makes the
report after it.

The first claim of a run reads nothing, because no step is recorded yet. A later claim reads all recorded
steps in one statement.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from horsies import tracing
from horsies.codec.results import encode_task_error
from horsies.config.app import AppConfig
from horsies.current_task import current_task
from horsies.db.statements.durable import load_steps
from horsies.durable.async_context import AsyncDurable
from horsies.durable.async_engine import AsyncEngine, patiently_async
from horsies.durable.context import Durable
from horsies.durable.engine import Engine, left_after, patiently
from horsies.durable.leaving import Leaving, Parked, RecordRefused, RunCancelled, Unreadable
from horsies.durable.past import Past
from horsies.durable.run import Fence, Run, limited
from horsies.error_codes import (
    OperationalErrorCode,
    error_code_text,
    resolve_code,
    resolve_exception_code,
)
from horsies.errors import DurableMisuse, StepFailed
from horsies.parking import ParkRequest
from horsies.result import Err
from horsies.task_result import TaskError
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.request import encode
from horsies.worker.child.payload import unreadable
from horsies.worker.child.process_state import log_safely
from horsies.worker.child.transact import Returned, Transactions
from horsies.worker.protocol import Assignment, ChildReport, TransactionEnd

logger = logging.getLogger("horsies.child")

NO_WORKER = (
    "This durable function does not run in a worker, so it has no record; send it to a worker, or run it "
    "with run_pending in a test."
)
_UNVISITED = "%s %s returned without asking for its recorded step %r%s; has its code changed?"


def begun(transactions: Transactions, definition: TaskDefinition, assignment: Assignment) -> Engine:
    """Create the engine of a call, with the recorded steps of its run."""
    _refuse_without_worker(transactions)
    past = _read_past(transactions, assignment) if assignment.generation > 1 else Past()
    engine = Engine(_run(transactions, definition, assignment, past), transactions)
    if (seconds := _deadline_of(definition)) is not None:
        engine.perform(limited(engine.run, seconds))
    return engine


async def begun_async(
    transactions: Transactions, definition: TaskDefinition, assignment: Assignment
) -> AsyncEngine:
    """Like ``begun``, but for a coroutine function and without blocking the event loop."""
    _refuse_without_worker(transactions)

    async def read() -> Past:
        async with transactions.database.connection_async() as connection:
            return Past(await load_steps.run_async(connection, _run_of(assignment)))

    past = await patiently_async(read) if assignment.generation > 1 else Past()
    engine = AsyncEngine(_run(transactions, definition, assignment, past), transactions)
    if (seconds := _deadline_of(definition)) is not None:
        await engine.perform(limited(engine.run, seconds))
    return engine


def _deadline_of(definition: TaskDefinition) -> float | None:
    return None if definition.durable is None else definition.durable.deadline_seconds


def _run_of(assignment: Assignment) -> tuple[str, int]:
    return assignment.task_id, assignment.generation


def _refuse_without_worker(transactions: Transactions) -> None:
    if not transactions.worker_id:
        raise DurableMisuse(NO_WORKER)


def _run(
    transactions: Transactions, definition: TaskDefinition, assignment: Assignment, past: Past
) -> Run:
    traits, config = definition.durable, transactions.config
    fence = Fence(
        transactions.worker_id, assignment.task_id, assignment.generation, assignment.attempt
    )
    signals = None if traits is None else traits.signals
    new_call = partial(_new_call, definition, transactions, assignment.task_id)
    run = Run(fence, past, partial(_code_of, definition, config), signals, new_call)
    if config.tracing is not None:
        run.surround = tracing.step_span
    return run


def _new_call(
    definition: TaskDefinition,
    transactions: Transactions,
    task_id: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[str, str]:
    """Return the JSON texts of the arguments with which a run continues; raise DurableMisuse if they do not
    fit the function.
    """
    if current_task().workflow_id is not None:
        raise DurableMisuse("ctx.continue_as is not for nodes: their workflow has their arguments.")
    encoded = encode(transactions.config.payload, definition, args, kwargs)
    if isinstance(encoded, Err):
        raise DurableMisuse(f"The run cannot continue: {encoded.value.message}")
    args_json, kwargs_json, _ = encoded.value
    payloads = transactions.installation.payloads
    if payloads is None:
        return args_json, kwargs_json
    try:  # the database extracts these texts from the request
        return payloads.stored(args_json, task_id), payloads.stored(kwargs_json, task_id)
    except psycopg.Error as error:
        raise left_after(error) from error


def _code_of(definition: TaskDefinition, config: AppConfig, error: BaseException) -> str:
    code = resolve_exception_code(
        error,
        definition.exception_mapper,
        config.exception_mapper,
        definition.default_unhandled_error_code,
        config.default_unhandled_error_code,
    )
    return str(error_code_text(code))


def _read_past(transactions: Transactions, assignment: Assignment) -> Past:
    def read() -> Past:
        with transactions.database.connection() as connection:
            return Past(load_steps.fetch(connection, *_run_of(assignment)))

    return patiently(read)


def with_clean_up(definition: TaskDefinition) -> TaskDefinition:
    """Return a copy of a durable function's definition whose calls also do the clean-up of a cancelled run,
    inside the hooks.
    """
    function = definition.function

    def call(ctx: Durable, *args: Any, **kwargs: Any) -> Any:
        engine = ctx._engine
        if not engine.run.past.is_cancelled:
            return function(ctx, *args, **kwargs)
        with suppress(Exception, RunCancelled):
            function(ctx, *args, **kwargs)
        return engine.perform(engine.run.cleaning())

    async def call_async(ctx: AsyncDurable, *args: Any, **kwargs: Any) -> Any:
        engine = ctx._engine
        if not engine.run.past.is_cancelled:
            return await function(ctx, *args, **kwargs)
        with suppress(Exception, RunCancelled):
            await function(ctx, *args, **kwargs)
        return await engine.perform(engine.run.cleaning())

    return replace(definition, function=call_async if definition.is_async else call)


def left(config: AppConfig, assignment: Assignment, how: Leaving) -> ChildReport:
    """Return the report of a call that left its function before it had an outcome."""
    report = ChildReport(assignment.task_id, assignment.generation, True, "", None, None)
    if isinstance(how, Parked):
        return report._replace(park=how.request)
    if isinstance(how, RunCancelled):
        level = logging.ERROR if "failed" in (how.text or "") else logging.INFO
        log_safely(logger, level, "%s %s: %s", assignment.task_name, assignment.task_id, how.text)
        return report._replace(park=ParkRequest(cancelled=how.text or ""))
    if isinstance(how, Unreadable):
        return unreadable(config, assignment, how.key_id)
    if isinstance(how, RecordRefused):
        error = how.error
        log_safely(logger, logging.ERROR, "%s", error.message)
        return report._replace(
            ok=False,
            result_json=encode_task_error(error),
            error_code=error_code_text(error.error_code),
            error_message=error.message,
        )
    return report._replace(transaction=TransactionEnd.LOST)


def judged(assignment: Assignment, run: Run, returned: Returned) -> Returned:
    """Return what the function returned or raised. A StepFailed that the function did not catch fails the
    run with the step's code.
    """
    if not isinstance(returned, TaskError):
        if unvisited := run.past.unvisited:
            others = f" and {len(unvisited) - 1} more" if len(unvisited) > 1 else ""
            words = assignment.task_name, assignment.task_id, unvisited[0], others
            log_safely(logger, logging.WARNING, _UNVISITED, *words)
        return returned
    raised = returned.exception
    is_mapped = returned.error_code is not OperationalErrorCode.UNHANDLED_EXCEPTION
    if not isinstance(raised, StepFailed) or is_mapped:
        return returned
    code, data = resolve_code(raised.code), raised.data
    message = f"In task {assignment.task_name!r}, {raised}"
    return returned.model_copy(update={"error_code": code, "message": message, "data": data})
