"""Loads the application inside a child, and turns each assignment into a report.

It finds the task, decodes the call by the function's signature, calls the function and encodes its result. A
failure at any step becomes the error in the report.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from horsies import tracing
from horsies.app import Horsies, set_current_app
from horsies.codec.calls import BoundCall, CallSignature, payload_bytes
from horsies.codec.form import TypeMismatch
from horsies.codec.results import ResultCodec, encode_task_error
from horsies.config.tracing import TracingConfig
from horsies.current_task import CurrentTask, current_task, keep_in_batch
from horsies.durable.async_context import AsyncDurable
from horsies.durable.context import Durable
from horsies.durable.leaving import Leaving
from horsies.encryption import is_opaque, masked, missing_key
from horsies.error_codes import ContractCode, OperationalErrorCode, error_code_text
from horsies.errors import (
    UNLIMITED_RETRIES,
    DurableMisuse,
    RetryLater,
    TaskStopped,
    checked_delay,
)
from horsies.failure_fingerprint import origin_of
from horsies.locate import load_app, sends_suppressed
from horsies.logs import set_log_headers
from horsies.result import Err, Ok
from horsies.retry import decide_retry, exception_names
from horsies.task_result import TaskError, TaskResult, exception_text
from horsies.tasks.batch import BatchResultMismatch, BatchTraits
from horsies.tasks.definition import RESERVED_PREFIX, TaskDefinition
from horsies.tasks.hooks import AroundTask, as_plain_calls, surround
from horsies.tasks.invoke import (
    await_function,
    call_function,
    checked_value,
    mismatch_error,
    run_coroutine,
)
from horsies.tasks.transaction import AsyncTaskTransaction, TaskTransaction
from horsies.worker.child import durable_run, payload
from horsies.worker.child.builtin_tasks import is_builtin, run_builtin
from horsies.worker.child.node_arguments import build_call
from horsies.worker.child.process_state import clear_timers, log_safely
from horsies.worker.child.transact import (
    AsyncAttemptTransaction,
    AttemptTransaction,
    Ended,
    Transactions,
)
from horsies.worker.protocol import Assignment, ChildBoot, ChildReport
from horsies.workflow.build.plan import SIGNAL_TASK, SLEEP_TASK

_MESSAGE_CHARACTERS_MAX = 2_000
# Errors of an expansion that another release of the application may not have.
_MISFITS = (
    OperationalErrorCode.SUBWORKFLOW_LOAD_FAILED,
    OperationalErrorCode.WORKER_SERIALIZATION_ERROR,
)
_NO_SPAN = "The span of task %r could not be %s."
# The library's own tasks that only mark a point in time in a workflow run; they get no span.
_UNTRACED = frozenset({SLEEP_TASK, SIGNAL_TASK})

logger = logging.getLogger("horsies.child")


def _nothing() -> TaskResult[None, TaskError]:
    return TaskResult(ok=None)


_WARM_UP = TaskDefinition(
    name=f"{RESERVED_PREFIX}warm_up",
    function=_nothing,
    is_async=False,
    is_plain=False,
    queue_name="",
    priority=0,
    retry_policy=None,
    exception_mapper={},
    default_unhandled_error_code=None,
    timeout_ms=None,
    signature=CallSignature.of(_nothing),
    results=ResultCodec.of(None, TaskError),
    location=None,
)


class AppProgram:
    """An application that can execute assignments."""

    def __init__(self, app: Horsies, worker_id: str = "") -> None:
        self._app = app
        self._tracing = app.config.tracing
        self.transactions = Transactions(app, worker_id)

    def start_hooks(self) -> Sequence[Callable[[], object]]:
        first = [tracing.start_in_child] if tracing.is_installed() else []
        return [*first, *as_plain_calls(self._app.hooks.start)]

    def stop_hooks(self) -> Sequence[Callable[[], object]]:
        last = [tracing.stop_in_child] if tracing.is_installed() else []
        return [*as_plain_calls(self._app.hooks.stop[::-1]), *last]

    def execute(self, assignment: Assignment) -> ChildReport:
        if self._tracing is not None and assignment.task_name not in _UNTRACED:
            return self._execute_traced(self._tracing, assignment)
        return execute(self._app, assignment, transactions=self.transactions)

    def execute_batch(self, assignments: Sequence[Assignment]) -> Sequence[ChildReport]:
        """Run assignments in one call, inside the first assignment's span, and name this span
        in all reports.
        """
        if self._tracing is None:
            return execute_batch(self._app, assignments)
        task = current_task()
        with _span_of(self._tracing, assignments[0]) as span:
            around = [] if span is None else [span.around]
            first, *others = execute_batch(self._app, assignments, around)
            if span is None:
                return [first, *others]
            first = _end_span(span, first, task)
            return [first, *(one._replace(traceparent=first.traceparent) for one in others)]

    def _execute_traced(self, settings: TracingConfig, assignment: Assignment) -> ChildReport:
        """Run an assignment inside a span, and name the span in its report."""
        with _span_of(settings, assignment) as span:
            around = [] if span is None else [span.around]
            report = execute(self._app, assignment, around, self.transactions)
            return report if span is None else _end_span(span, report, current_task())

    async def execute_async(self, assignment: Assignment) -> ChildReport:
        """Like ``execute``, but on the running event loop and in the assignment's own context."""
        if self._tracing is None or assignment.task_name in _UNTRACED:
            return await execute_async(self._app, assignment, transactions=self.transactions)
        with _span_of(self._tracing, assignment) as span:
            around = [] if span is None else [span.around]
            report = await execute_async(self._app, assignment, around, self.transactions)
            return report if span is None else _end_span(span, report, current_task())

    def warm_up(self, assignment: Assignment) -> ChildReport:
        """Run a no-op task along the path of ordinary tasks, to warm up that path."""
        return _execute(self._app, _WARM_UP, assignment, self.transactions)

    def close(self) -> None:
        """Close the connections that task code opened by sending tasks, and those of task transactions."""
        self.transactions.close()
        closed = self._app.close()
        if isinstance(closed, Err):
            message = "Closing the child's connections failed: %s"
            log_safely(logger, logging.DEBUG, message, closed.value.message)


def load_program(boot: ChildBoot) -> AppProgram:
    """Load the application and its task modules, with sends suppressed, and make it the current
    application.
    """
    with sends_suppressed():
        app = load_app(boot.app_locator)
        app.role = "child"
        app.get_broker().skip_schema_check()
        set_current_app(app)
        app.import_task_modules(boot.modules or None)
    set_log_headers(app.config.log_headers)
    return AppProgram(app, boot.worker_id)


@contextmanager
def _span_of(
    settings: TracingConfig, assignment: Assignment
) -> Iterator[tracing.Processing | None]:
    """Start an attempt's span and make it current; None if the application's tracing fails."""
    task = current_task()
    size = len(assignment.args_json) + len(assignment.kwargs_json)
    attributes: dict[str, str | int] = {"messaging.message.body.size": size}
    if assignment.node is not None:
        root = assignment.node.root_workflow_id or assignment.node.workflow_id
        attributes["messaging.message.conversation_id"] = root
    try:
        span = tracing.Processing(settings, task, attributes)
        span.attach()
    except Exception as error:  # the application's sampler or span processor may raise
        log_safely(logger, logging.ERROR, _NO_SPAN, task.name, "started", error=error)
        yield None
        return
    try:
        yield span
    except BaseException:
        span.detach()  # the worker has stopped the task and records the span with its reason
        raise


def _end_span(span: tracing.Processing, report: ChildReport, task: CurrentTask) -> ChildReport:
    """End an attempt's span with its outcome, and name the span in the report."""
    try:
        code = None if report.ok else report.error_code or "ERROR"
        will_retry = code is not None and _will_retry(task, report)
        span.end(code, masked(report.error_message or ""), will_retry=will_retry)
    except Exception as error:
        log_safely(logger, logging.ERROR, _NO_SPAN, task.name, "ended", error=error)
        return report
    return report._replace(traceparent=span.traceparent)


def _will_retry(task: CurrentTask, report: ChildReport) -> bool:
    """Return the outcome that the worker will probably record; it also considers ``good_until`` and
    cancellation, which are not checked here.
    """
    limit = task.max_attempts
    decision = decide_retry(
        task_options=json.dumps(dict(task.options)),
        error_code=report.error_code,
        retry_count=task.attempt - 1,
        max_retries=UNLIMITED_RETRIES if limit is None else limit - 1,
        exception_names=report.exception_names,
        retry_after=report.retry_after,
    )
    return decision.delay_seconds is not None


def execute(
    app: Horsies,
    assignment: Assignment,
    around: Sequence[AroundTask] = (),
    transactions: Transactions | None = None,
) -> ChildReport:
    """Run one of `app`'s assignments and report its outcome. The only exception it raises is TaskStopped.

    ``around`` contains further hooks, which run around the application's hooks.
    """
    readable = assignment
    if missing_key(*assignment.payload()) is not None:
        decrypted = payload.decrypted(app, assignment)
        if isinstance(decrypted, ChildReport):
            return decrypted
        readable = decrypted
    report = _executed(app, readable, around, transactions)
    return payload.encrypted(app, readable, report) if is_opaque(app.config.broker) else report


def _decrypted(app: Horsies, assignment: Assignment) -> Assignment | ChildReport:
    """Return the assignment with readable texts, or the report of the failure to read them."""
    is_readable = missing_key(*assignment.payload()) is None
    return assignment if is_readable else payload.decrypted(app, assignment)


def _encrypted(app: Horsies, assignment: Assignment, report: ChildReport) -> ChildReport:
    """Return the report in the form in which it is stored."""
    if not is_opaque(app.config.broker):
        return report
    return payload.encrypted(app, assignment, report)


def _executed(
    app: Horsies,
    assignment: Assignment,
    around: Sequence[AroundTask],
    transactions: Transactions | None,
) -> ChildReport:
    try:
        task = app.get_task(assignment.task_name)
        if task is None:
            return _execute_builtin(app, assignment)
        hooks = [*around, *app.hooks.around] if around else app.hooks.around
        definition = task.definition
        if definition.durable is not None:
            definition = durable_run.with_clean_up(definition)
        definition = surround(definition, hooks) if hooks else definition
        return _execute(app, definition, assignment, transactions)
    except TaskStopped:
        raise
    except BaseException as error:  # reading arguments and writing results also runs user code
        return _failure(assignment, _codec_error(assignment, error))


def execute_batch(
    app: Horsies, assignments: Sequence[Assignment], around: Sequence[AroundTask] = ()
) -> list[ChildReport]:
    """Run assignments of one batched task in one call, and report the outcome of each, in order. The
    only exception it raises is TaskStopped.

    An assignment whose arguments cannot be read or do not fit is reported as a failure and left out of
    the call.
    """
    task = app.get_task(assignments[0].task_name)
    if task is None or task.definition.batch is None:
        return [execute(app, one, around) for one in assignments]
    reports: dict[str, ChildReport] = {}
    called: list[tuple[Assignment, Any]] = []
    for assignment in assignments:
        read = _item_of(app, task.definition, assignment)
        if isinstance(read, ChildReport):
            reports[assignment.task_id] = read
        else:
            called.append(read)
    if called:
        keep_in_batch({one.task_id for one, _ in called})
        definition = replace(task.definition, function=task.definition.batch.function)
        hooks = [*around, *app.hooks.around]
        definition = surround(definition, hooks) if hooks else definition
        for (assignment, _), report in zip(
            called, _call_batch(app, definition, task.definition.batch, called), strict=True
        ):
            reports[assignment.task_id] = _encrypted(app, assignment, report)
    return [reports[one.task_id] for one in assignments]


def _item_of(
    app: Horsies, definition: TaskDefinition, assignment: Assignment
) -> tuple[Assignment, Any] | ChildReport:
    """Return an assignment in readable form and its only argument, or a report of the failure to read
    that argument.
    """
    readable = _decrypted(app, assignment)
    if isinstance(readable, ChildReport):
        return readable
    try:
        call = _decode_call(app, definition, readable)
    except TaskStopped:
        raise
    except BaseException as error:  # reading arguments also runs user code
        call = _failure(readable, _codec_error(readable, error))
    if isinstance(call, ChildReport):
        return _encrypted(app, readable, call)
    (item,) = [*call.args, *call.kwargs.values()]
    return readable, item


def _call_batch(
    app: Horsies,
    definition: TaskDefinition,
    batch: BatchTraits,
    called: Sequence[tuple[Assignment, Any]],
) -> list[ChildReport]:
    """Call a batched function and report the outcome of each item. If the call fails, all of its tasks
    get the error, whose traceback is logged once.
    """
    items = [item for _, item in called]
    # The call returns a list; the value of each task is checked below.
    whole = replace(definition, is_plain=True)
    returned = _call(app, whole, BoundCall((items,), {}))
    outcomes: Sequence[Any] = ()
    error = returned if isinstance(returned, TaskError) else None
    if not isinstance(returned, TaskError):
        try:
            outcomes = batch.outcomes(returned.ok, len(items))
        except BatchResultMismatch as mismatch:
            code = ContractCode.BATCH_RESULT_MISMATCH
            error = TaskError(error_code=code, message=str(mismatch))
    if error is not None:
        first = _encode(app, definition, called[0][0], error)
        return [first._replace(task_id=one.task_id, generation=one.generation) for one, _ in called]
    return [
        _encode_outcome(app, definition, assignment, outcome)
        for (assignment, _), outcome in zip(called, outcomes, strict=True)
    ]


def _encode_outcome(
    app: Horsies, definition: TaskDefinition, assignment: Assignment, outcome: Any
) -> ChildReport:
    try:
        return _encode(app, definition, assignment, checked_value(definition, outcome))
    except TaskStopped:
        raise
    except BaseException as error:  # writing results also runs user code
        return _failure(assignment, _codec_error(assignment, error))


async def execute_async(
    app: Horsies,
    assignment: Assignment,
    around: Sequence[AroundTask] = (),
    transactions: Transactions | None = None,
) -> ChildReport:
    """Like ``execute``, but on the running event loop; a task that the worker stops raises CancelledError."""
    readable: Assignment | ChildReport = assignment
    if missing_key(*assignment.payload()) is not None:
        readable = await payload.decrypted_async(app, assignment)
    if isinstance(readable, ChildReport):
        return readable
    report = await _executed_async(app, readable, around, transactions)
    if not is_opaque(app.config.broker):
        return report
    return await payload.encrypted_async(app, readable, report)


async def _executed_async(
    app: Horsies,
    assignment: Assignment,
    around: Sequence[AroundTask],
    transactions: Transactions | None,
) -> ChildReport:
    try:
        task = app.get_task(assignment.task_name)
        if task is None:
            return _execute_builtin(app, assignment)
        hooks = [*around, *app.hooks.around] if around else app.hooks.around
        definition = task.definition
        if definition.durable is not None:
            definition = durable_run.with_clean_up(definition)
        definition = surround(definition, hooks) if hooks else definition
        if not definition.is_async and (definition.signature.transaction or definition.durable):
            return _execute(app, definition, assignment, transactions)
        call = _decode_call(app, definition, assignment)
        if isinstance(call, ChildReport):
            return call
        if definition.durable is not None:
            given = transactions or Transactions(app)
            return await _await_durable(app, definition, assignment, call, given)
        if definition.signature.transaction is not None:
            given = transactions or Transactions(app)
            return await _await_in_transaction(app, definition, assignment, call, given)
        returned = await await_function(app.config, definition, call.args, call.kwargs)
        if isinstance(returned, TaskError) and _is_stop(returned.exception):
            # the worker has stopped the task and records the outcome with its reason
            raise asyncio.CancelledError
        return _encode(app, definition, assignment, returned)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _failure(assignment, _codec_error(assignment, error))


def _is_stop(raised: object) -> bool:
    """Return whether the worker has cancelled the running coroutine; task code may raise
    CancelledError too.
    """
    if not isinstance(raised, asyncio.CancelledError) or not current_task().should_stop():
        return False
    running = asyncio.current_task()
    return running is not None and running.cancelling() > 0


def _codec_error(assignment: Assignment, error: BaseException) -> TaskError:
    message = (
        f"Reading the arguments of task {assignment.task_name!r} or storing its result "
        f"raised {type(error).__name__}: {exception_text(error)}"
    )
    if isinstance(error, DurableMisuse):  # its sentence says why the function was not called
        message = str(error)
    return TaskError(
        error_code=OperationalErrorCode.TASK_EXCEPTION, message=message, exception=error
    )


def _execute(
    app: Horsies,
    definition: TaskDefinition,
    assignment: Assignment,
    transactions: Transactions | None,
) -> ChildReport:
    call = _decode_call(app, definition, assignment)
    if isinstance(call, ChildReport):
        return call
    if definition.durable is not None:
        given = transactions or Transactions(app)
        if not definition.is_async:
            return _execute_durable(app, definition, assignment, call, given)
        awaited: ChildReport = run_coroutine(
            _await_durable(app, definition, assignment, call, given)
        )
        return awaited
    if (parameter := definition.signature.transaction) is None:
        return _encode(app, definition, assignment, _call(app, definition, call))
    given = transactions or Transactions(app)
    if definition.is_async:
        coroutine = _await_in_transaction(app, definition, assignment, call, given)
        reported: ChildReport = run_coroutine(coroutine)
        return reported
    transaction = AttemptTransaction(given, definition, assignment)
    call.kwargs[parameter] = TaskTransaction(assignment.attempt, assignment.generation, transaction)
    try:
        returned = _call_until_stop(app, definition, call)
        ended = transaction.recorded()
        if isinstance(returned, TaskError):
            if (stop := _stop_of(returned)) is not None:
                return _end_of_stopped(assignment, stop, ended)
            returned = transaction.judged(returned)
        report = _encode(app, definition, assignment, returned)
        if ended is None and report.ok and transaction.is_open:
            ended = transaction.finish(report.result_json)
        return report if ended is None else _with_transaction(assignment, report, ended)
    finally:
        transaction.close()


def _execute_durable(
    app: Horsies,
    definition: TaskDefinition,
    assignment: Assignment,
    call: BoundCall,
    transactions: Transactions,
) -> ChildReport:
    """Call a durable function with its context, until the function ends or its run is parked."""
    try:
        engine = durable_run.begun(transactions, definition, assignment)
    except Leaving as how:
        return durable_run.left(app.config, assignment, how)
    run = engine.run
    given = BoundCall((Durable(engine), *call.args), call.kwargs)
    returned = _call(app, definition, given)
    run.is_over = True
    # The run waits even if its code has caught the exception that leaves the function.
    if run.left is not None:
        return durable_run.left(app.config, assignment, run.left)
    return _encode(app, definition, assignment, durable_run.judged(assignment, run, returned))


async def _await_durable(
    app: Horsies,
    definition: TaskDefinition,
    assignment: Assignment,
    call: BoundCall,
    transactions: Transactions,
) -> ChildReport:
    """Like ``_execute_durable``, but for a coroutine function, on the running event loop."""
    try:
        engine = await durable_run.begun_async(transactions, definition, assignment)
    except Leaving as how:
        return durable_run.left(app.config, assignment, how)
    run, args = engine.run, (AsyncDurable(engine), *call.args)
    returned = await await_function(app.config, definition, args, call.kwargs)
    run.is_over = True
    if run.left is not None:
        return durable_run.left(app.config, assignment, run.left)
    if (stop := _stop_of(returned)) is not None:
        raise stop
    return _encode(app, definition, assignment, durable_run.judged(assignment, run, returned))


async def _await_in_transaction(
    app: Horsies,
    definition: TaskDefinition,
    assignment: Assignment,
    call: BoundCall,
    transactions: Transactions,
) -> ChildReport:
    """Run a task's coroutine with its transaction, on the running event loop."""
    transaction = AsyncAttemptTransaction(transactions, definition, assignment)
    given = AsyncTaskTransaction(assignment.attempt, assignment.generation, transaction)
    try:
        kwargs = {**call.kwargs, definition.signature.transaction or "": given}
        awaited = await await_function(app.config, definition, call.args, kwargs)
        ended = await transaction.recorded()
        if isinstance(awaited, TaskError):
            if (stop := _stop_of(awaited)) is not None:
                return _end_of_stopped(assignment, stop, ended)
            awaited = transaction.judged(awaited)
        report = _encode(app, definition, assignment, awaited)
        if ended is None and report.ok and transaction.is_open:
            ended = await transaction.finish(report.result_json)
        return report if ended is None else _with_transaction(assignment, report, ended)
    finally:
        await transaction.close()


def _call_until_stop(
    app: Horsies, definition: TaskDefinition, call: BoundCall
) -> TaskResult[Any, TaskError] | TaskError:
    """Like ``_call``, but return TaskStopped as an error, because the task may have committed its recorded
    outcome before the stop.
    """
    try:
        return _call(app, definition, call)
    except TaskStopped as stop:
        code = OperationalErrorCode.UNHANDLED_EXCEPTION
        return TaskError(error_code=code, exception=stop)


def _stop_of(
    returned: TaskResult[Any, TaskError] | TaskError,
) -> TaskStopped | asyncio.CancelledError | None:
    """Return the exception if the worker used it to stop a task's code, otherwise None. In an async child
    this is a cancellation; in a child that runs one task at a time, TaskStopped.
    """
    raised = returned.exception if isinstance(returned, TaskError) else None
    if isinstance(raised, TaskStopped):
        return raised
    return asyncio.CancelledError() if _is_stop(raised) else None


def _end_of_stopped(
    assignment: Assignment, stop: TaskStopped | asyncio.CancelledError, ended: Ended | None
) -> ChildReport:
    """Return the report of a stopped task if it has committed its recorded outcome; otherwise raise the
    stop again.
    """
    if ended is None or ended.recorded is None:
        raise stop
    return _recorded(assignment, ended.recorded, ended)


def _recorded(assignment: Assignment, result_json: str, ended: Ended) -> ChildReport:
    task_id, generation = assignment.task_id, assignment.generation
    report = ChildReport(task_id, generation, True, result_json, None, None)
    return report._replace(transaction=ended.end)


def _with_transaction(assignment: Assignment, report: ChildReport, ended: Ended) -> ChildReport:
    """Return a task's report, adjusted to the end of its transaction. A success that the task has recorded
    in its own transaction counts even if the task failed afterwards.
    """
    if ended.recorded is not None:
        return _recorded(assignment, ended.recorded, ended)
    if report.ok and ended.error is not None:
        report = _failure(assignment, ended.error)
    return report._replace(transaction=ended.end)


def _decode_call(
    app: Horsies, definition: TaskDefinition, assignment: Assignment
) -> BoundCall | ChildReport:
    """Return the arguments of the call, or a report that they do not fit the function."""
    signature = definition.signature
    if assignment.node is None:
        call = signature.decode_call(assignment.args_json, assignment.kwargs_json)
    else:
        call = build_call(app, assignment, signature, assignment.kwargs_json)
    if isinstance(call, Ok):
        return call.value
    problem = f"Task {definition.name!r} was not called: {call.value.message}"
    return _uncalled(assignment, _serialization_error(problem))


def _encode(
    app: Horsies,
    definition: TaskDefinition,
    assignment: Assignment,
    returned: TaskResult[Any, TaskError] | TaskError,
) -> ChildReport:
    if isinstance(returned, TaskError):
        return _report(app, definition, assignment, encode_task_error(returned), returned)
    encoded = definition.results.encode(returned)
    if isinstance(encoded, Ok):
        error = None if returned.is_ok() else returned.err_value
        return _report(app, definition, assignment, encoded.value, error)
    if isinstance(encoded.value, TypeMismatch):
        return _failure(assignment, mismatch_error(definition, returned, encoded.value))
    if returned.is_err():  # only the error's code and message are stored
        return _failure(assignment, returned.err_value)
    problem = f"The result of task {definition.name!r} cannot be stored: {encoded.value.message}"
    return _failure(assignment, _serialization_error(problem))


def _call(
    app: Horsies, definition: TaskDefinition, call: BoundCall
) -> TaskResult[Any, TaskError] | TaskError:
    try:
        return call_function(app.config, definition, call.args, call.kwargs, clear_timers)
    except KeyboardInterrupt:
        # Children ignore Ctrl-C, so the task itself raised KeyboardInterrupt.
        return TaskError(
            error_code=OperationalErrorCode.UNHANDLED_EXCEPTION,
            message=f"Task {definition.name!r} raised KeyboardInterrupt.",
        )


def _execute_builtin(app: Horsies, assignment: Assignment) -> ChildReport:
    """Run one of the library's built-in tasks; any other task that is not registered is an error."""
    if not is_builtin(assignment):
        problem = TaskError(
            error_code=OperationalErrorCode.WORKER_RESOLUTION_ERROR,
            message=f"Task {assignment.task_name!r} is not registered in this worker; "
            "add its module to discover_tasks, or send it to a queue of workers that have it.",
        )
        return _failure(assignment, problem)
    done = run_builtin(app, assignment)
    if isinstance(done, Err):
        is_misfit = done.value.error_code in _MISFITS
        return (_uncalled if is_misfit else _failure)(assignment, done.value)
    result_json = f'{{"ok":{done.value}}}'
    return ChildReport(assignment.task_id, assignment.generation, True, result_json, None, None)


def _report(
    app: Horsies,
    definition: TaskDefinition,
    assignment: Assignment,
    result_json: str,
    error: TaskError | None,
) -> ChildReport:
    """Report a result. A value that is too large is replaced by an error; an error that is too large
    loses its data.
    """
    payload, size = app.config.payload, payload_bytes(result_json)
    limit = payload.max_result_bytes
    if limit is not None and size > limit:
        too_large = (
            f"The result of task {definition.name!r} has {size} bytes of JSON, more than "
            f"payload.max_result_bytes={limit}; return a reference to the data instead."
        )
        if error is None:
            code = OperationalErrorCode.PAYLOAD_TOO_LARGE
            return _failure(assignment, TaskError(error_code=code, message=too_large))
        message = (error.message or "")[:_MESSAGE_CHARACTERS_MAX]
        data = {"left_out": too_large}
        shortened = TaskError(error_code=error.error_code, message=message, data=data)
        return _with_exception(_failure(assignment, shortened), error.exception)
    if size > payload.warn_bytes:
        log_safely(
            logger,
            logging.WARNING,
            "The result of task %r has %d bytes of JSON, more than payload.warn_bytes=%d.",
            definition.name,
            size,
            payload.warn_bytes,
        )
    if error is not None:
        return _error_report(assignment, result_json, error)
    return ChildReport(assignment.task_id, assignment.generation, True, result_json, None, None)


def _failure(assignment: Assignment, error: TaskError) -> ChildReport:
    return _error_report(assignment, encode_task_error(error), error)


def _uncalled(assignment: Assignment, error: TaskError) -> ChildReport:
    """Report that the stored call does not fit the function; the parent logs this unless another worker
    takes the task.
    """
    return ChildReport(
        assignment.task_id,
        assignment.generation,
        False,
        encode_task_error(error),
        error_code_text(error.error_code),
        error.message,
        was_called=False,
    )


def _error_report(assignment: Assignment, result_json: str, error: TaskError) -> ChildReport:
    # Log the exception of a failed task, or a problem found by the library. An error that the task returned
    # is not logged.
    if isinstance(error.exception, RetryLater):
        log_safely(logger, logging.INFO, "%s", error.message)
    elif isinstance(error.exception, BaseException):
        log_safely(logger, logging.ERROR, "%s", error.message, error=error.exception)
    elif isinstance(error.error_code, OperationalErrorCode | ContractCode):
        log_safely(logger, logging.ERROR, "%s", error.message)
    report = ChildReport(
        task_id=assignment.task_id,
        generation=assignment.generation,
        ok=False,
        result_json=result_json,
        error_code=error_code_text(error.error_code),
        error_message=error.message,
    )
    return _with_exception(report, error.exception)


def _with_exception(report: ChildReport, raised: object) -> ChildReport:
    """Add the facts by which the worker decides whether to retry after an exception, and the place where the
    exception was raised.
    """
    if not isinstance(raised, BaseException):
        return report
    seconds = checked_delay(raised.seconds) if isinstance(raised, RetryLater) else None
    return report._replace(
        exception_names=tuple(exception_names(raised)),
        retry_after=seconds,
        origin=origin_of(raised),
    )


def _serialization_error(message: str) -> TaskError:
    return TaskError(error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR, message=message)
