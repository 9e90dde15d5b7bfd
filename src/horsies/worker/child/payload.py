"""Decrypts the payload of assignments before a task runs, and encrypts the payload of reports after it.

The parent passes texts on in their stored form. So children share the work of encryption, and large payloads
in a store never pass through the parent. A child that lacks a key or a store reports this without calling the
function, and the worker holds the task.

Readable assignments, and the reports of applications without a codec and a store, do not pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import psycopg

from horsies.app import Horsies
from horsies.codec.results import encode_task_error
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.errors import ErrorKind, describe, kind_of
from horsies.encryption import Payloads, missing_key, store_of
from horsies.error_codes import OperationalErrorCode
from horsies.payload_store import TABLE_STORE
from horsies.retry import Backoff
from horsies.task_result import TaskError
from horsies.tasks.waiters import is_loop_running
from horsies.worker.child.process_state import log_safely
from horsies.worker.protocol import Assignment, ChildReport, TransactionEnd
from horsies.workflow.build.plan import EXPAND_TASK, SIGNAL_TASK, is_mapped

logger = logging.getLogger("horsies.child")
T = TypeVar("T")

# The first and the longest pause, in milliseconds, before a child tries again to store a result, and how
# often it logs that.
_WAIT_MS = (200, 10_000)
_REPORT_SECONDS = 60.0


def payloads_of(app: Horsies) -> Payloads | None:
    """Return the ``Payloads`` of the application's database; None without a codec and a store."""
    config = app.config.broker
    return Payloads.of(config) if config.store is None else app.get_broker().database.payloads


def decrypted(app: Horsies, assignment: Assignment) -> Assignment | ChildReport:
    """Return the assignment with readable texts, or the report that a key is missing."""
    if (payloads := payloads_of(app)) is not None:
        try:
            assignment = _readable(payloads, assignment)
        except psycopg.Error as error:
            return _unreachable(assignment, error)
    key_id = missing_key(*assignment.payload())
    return assignment if key_id is None else unreadable(app.config, assignment, key_id)


async def decrypted_async(app: Horsies, assignment: Assignment) -> Assignment | ChildReport:
    """Like ``decrypted``, but if an event loop is running, do not block it during requests to the store."""
    if app.config.broker.store is None or not is_loop_running():
        return decrypted(app, assignment)
    return await asyncio.to_thread(decrypted, app, assignment)


def _readable(payloads: Payloads, assignment: Assignment) -> Assignment:
    node = assignment.node
    if node is not None and node.sources:
        sources = [one._replace(result=payloads.decrypt(one.result)) for one in node.sources]
        node = node._replace(sources=tuple(sources))
    return assignment._replace(
        args_json=payloads.decrypt(assignment.args_json),
        kwargs_json=payloads.decrypt(assignment.kwargs_json),
        node=node,
    )


def unreadable(config: AppConfig, assignment: Assignment, key_id: str) -> ChildReport:
    """Return the report of a task whose payload cannot be read: the application lacks the key or the
    store, or cannot read the payload with them.
    """
    payload = f"The payload of task {assignment.task_name!r} is"
    if (store_id := store_of(key_id)) is not None:
        is_known = config.broker.store is not None and store_id in (
            TABLE_STORE,
            config.broker.store.store_id,
        )
        message = f"{payload} kept in the store {store_id!r}, " + (
            "which does not have it, or has another one under its name."
            if is_known
            else "which this worker does not have; add it to the worker's PostgresConfig."
        )
        return _held(assignment, key_id, message, is_damaged=is_known)
    payloads = Payloads.of(config.broker)
    is_known = payloads is not None and key_id in payloads.key_ids
    message = f"{payload} encrypted with key {key_id}, which " + (
        "this worker has, but the codec cannot decrypt it: the text was changed, or it was encrypted "
        "with another key of this id."
        if is_known
        else "this worker does not have; add the key to the codec of the worker's PostgresConfig."
    )
    return _held(assignment, key_id, message, is_damaged=is_known)


def _unreachable(assignment: Assignment, error: psycopg.Error) -> ChildReport:
    """Return the report of a task whose payload is in a store that does not respond; the task is tried again
    soon.
    """
    key_id = missing_key(*assignment.payload()) or ""
    message = f"The payload of task {assignment.task_name!r} cannot be read: {describe(error)}"
    return _held(assignment, key_id, message, is_unreachable=True)


def _held(assignment: Assignment, key_id: str, message: str, **facts: bool) -> ChildReport:
    code = OperationalErrorCode.PAYLOAD_UNREADABLE
    data = {"key_id": key_id} | {name: True for name, is_true in facts.items() if is_true}
    error = TaskError(error_code=code, message=message, data=data)
    return ChildReport(
        assignment.task_id,
        assignment.generation,
        False,
        encode_task_error(error),
        code.value,
        message,
        was_called=False,
    )


def encrypted(app: Horsies, assignment: Assignment, report: ChildReport) -> ChildReport:
    """Return the report in the form in which it is stored.

    If the application has a codec, the result and the message are encrypted. If it has a store, a
    reference replaces a large result. The plan of a sub-workflow stays readable, because the database
    turns it into rows; its arguments are encrypted one by one.
    """
    payloads = payloads_of(app)
    if payloads is None:
        return report
    config = app.config.broker
    if not payloads.has_store:
        return _encrypted(config, payloads, assignment, report)
    return _until_stored(assignment, partial(_encrypted, config, payloads, assignment, report))


async def encrypted_async(app: Horsies, assignment: Assignment, report: ChildReport) -> ChildReport:
    """Like ``encrypted``, but without blocking the event loop during requests to the store."""
    payloads = payloads_of(app)
    if payloads is None or not payloads.has_store:
        return encrypted(app, assignment, report)
    store = partial(_encrypted, app.config.broker, payloads, assignment, report)
    return await _until_stored_async(assignment, store)


def _encrypted(
    config: PostgresConfig, payloads: Payloads, assignment: Assignment, report: ChildReport
) -> ChildReport:
    is_plan = report.ok and assignment.task_name == EXPAND_TASK
    if is_plan or not report.result_json:
        return report
    if not report.was_called:
        is_secret = config.codec is not None and config.encrypt_errors
        return _without_reason(assignment, report) if is_secret else report
    if report.transaction is TransactionEnd.RECORDED:  # the task has stored this result
        payloads = Payloads(config.codec, encrypt_errors=config.encrypt_errors)
    try:
        result = _stored(payloads, assignment, report.result_json)
        message = payloads.encrypt_message(report.error_message)
    except psycopg.Error as error:
        if kind_of(error) is not ErrorKind.DATA:
            raise
        return _unstorable(assignment, report, describe(error).rstrip("."), error)
    except Exception as raised:  # the application's codec raised the exception
        name = type(raised.__cause__ or raised).__name__
        problem = f"the codec of the worker's PostgresConfig raised {name} when it encrypted it"
        return _unstorable(assignment, report, problem, raised)
    if result is report.result_json and message is report.error_message:
        return report
    return report._replace(result_json=result, error_message=message)


def stored_result(payloads: Payloads | None, assignment: Assignment, result_json: str) -> str:
    """Return a result in its stored form."""
    if payloads is None:
        return result_json
    return _until_stored(assignment, partial(_stored, payloads, assignment, result_json))


async def stored_result_async(
    payloads: Payloads | None, assignment: Assignment, result_json: str
) -> str:
    """Like ``stored_result``, but without blocking the event loop during requests to the store."""
    if payloads is None or not payloads.has_store:
        return stored_result(payloads, assignment, result_json)
    return await _until_stored_async(
        assignment, partial(_stored, payloads, assignment, result_json)
    )


def _stored(payloads: Payloads, assignment: Assignment, result_json: str) -> str:
    node = assignment.node
    by_element = node is not None and (
        assignment.task_name == SIGNAL_TASK or is_mapped(node.inputs_json)
    )
    return payloads.encrypt_result(result_json, assignment.task_id, by_element=by_element)


def _until_stored(assignment: Assignment, store: Callable[[], T]) -> T:
    """Call ``store``, and repeat the call while the payload store does not respond. The worker can still
    stop the task.
    """
    outage: _Outage | None = None
    while True:
        try:
            return store()
        except psycopg.Error as error:
            outage = outage or _Outage(assignment)
            seconds = outage.pause_after(error)
        time.sleep(seconds)


async def _until_stored_async(assignment: Assignment, store: Callable[[], T]) -> T:
    if not is_loop_running():  # tests call a task as a plain function
        return _until_stored(assignment, store)
    outage: _Outage | None = None
    while True:
        try:
            return await asyncio.to_thread(store)
        except psycopg.Error as error:
            outage = outage or _Outage(assignment)
            seconds = outage.pause_after(error)
        await asyncio.sleep(seconds)


class _Outage:
    """An outage of the store: a task that has ended waits until its result is stored."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._backoff = Backoff(*_WAIT_MS)
        self._reports_at = 0.0

    def pause_after(self, error: psycopg.Error) -> float:
        """Log the failure, at most once a minute, and return the seconds until the next try. An error that
        concerns only this result is raised.
        """
        if kind_of(error) is ErrorKind.DATA:
            raise error
        if (now := time.monotonic()) >= self._reports_at:
            self._reports_at = now + _REPORT_SECONDS
            task_name, task_id = self._assignment.task_name, self._assignment.task_id
            message = "the result of task %r, %s, waits until it can be stored: %s"
            log_safely(logger, logging.WARNING, message, task_name, task_id, describe(error))
        return self._backoff.next_delay_seconds() or 0.0


def _without_reason(assignment: Assignment, report: ChildReport) -> ChildReport:
    """Return the report of a call that does not fit the function, without the reason.

    The reason may quote an application's validator or the keys of a dictionary, and this text is stored
    unencrypted.
    """
    if report.error_code != OperationalErrorCode.WORKER_SERIALIZATION_ERROR.value:
        return report
    log_safely(logger, logging.WARNING, "%s", report.error_message)
    message = (
        f"Task {assignment.task_name!r} was not called: its stored arguments do not fit the function; the "
        "log of the worker has the reason."
    )
    error = TaskError(error_code=OperationalErrorCode.WORKER_SERIALIZATION_ERROR, message=message)
    return report._replace(result_json=encode_task_error(error), error_message=message)


def _unstorable(
    assignment: Assignment, report: ChildReport, problem: str, raised: Exception
) -> ChildReport:
    """Return the report of a task whose outcome cannot be stored. Its message quotes nothing confidential."""
    code = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    message = f"The result of task {assignment.task_name!r} cannot be stored: {problem}."
    log_safely(logger, logging.ERROR, "%s", message, error=raised)
    error = TaskError(error_code=code, message=message)
    return report._replace(
        ok=False,
        result_json=encode_task_error(error),
        error_code=code.value,
        error_message=message,
    )
