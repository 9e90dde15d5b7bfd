"""The payload of assignments and reports in a child: decrypted before a task runs, encrypted after it.

The parent passes texts on as they are stored, so children share the work of encryption. A child that lacks a
key reports it without calling the function, and the worker holds the task.
"""

from __future__ import annotations

import logging

from horsies.app import Horsies
from horsies.codec.results import encode_task_error
from horsies.config.app import AppConfig
from horsies.encryption import Payloads, missing_key
from horsies.error_codes import OperationalErrorCode
from horsies.task_result import TaskError
from horsies.worker.child.process_state import log_safely
from horsies.worker.protocol import Assignment, ChildReport
from horsies.workflow.build.plan import EXPAND_TASK, SIGNAL_TASK, is_mapped

logger = logging.getLogger("horsies.child")


def decrypted(app: Horsies, assignment: Assignment) -> Assignment | ChildReport:
    """Return the assignment with readable texts, or the report that a key is missing."""
    payloads, node = Payloads.of(app.config.broker), assignment.node
    if payloads is not None:
        if node is not None and node.sources:
            sources = [one._replace(result=payloads.decrypt(one.result)) for one in node.sources]
            node = node._replace(sources=tuple(sources))
        assignment = assignment._replace(
            args_json=payloads.decrypt(assignment.args_json),
            kwargs_json=payloads.decrypt(assignment.kwargs_json),
            node=node,
        )
    key_id = missing_key(assignment.args_json, assignment.kwargs_json)
    if key_id is None and node is not None and node.sources:
        key_id = missing_key(*[one.result for one in node.sources])
    return assignment if key_id is None else unreadable(app.config, assignment, key_id)


def unreadable(config: AppConfig, assignment: Assignment, key_id: str) -> ChildReport:
    """The report of a task whose payload cannot be read: this application does not have its key, or the key
    does not decrypt it.
    """
    code, payloads = OperationalErrorCode.PAYLOAD_UNREADABLE, Payloads.of(config.broker)
    message = f"The payload of task {assignment.task_name!r} is encrypted with key {key_id}, which "
    data: dict[str, str | bool] = {"key_id": key_id}
    if payloads is not None and key_id in payloads.key_ids:
        data["is_damaged"] = True
        message += (
            "this worker has, but the codec cannot decrypt it: the text was changed, or it was encrypted "
            "with another key of this id."
        )
    else:
        message += (
            "this worker does not have; add the key to the codec of the worker's PostgresConfig."
        )
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
    """Return the report with its result and its message encrypted, if the application has a codec.

    The plan of a sub-workflow stays readable: the database makes rows of it, and its arguments are encrypted
    one by one.
    """
    payloads = Payloads.of(app.config.broker)
    is_plan = report.ok and assignment.task_name == EXPAND_TASK
    if payloads is None or is_plan or not report.result_json:
        return report
    if not report.was_called:
        return _without_reason(assignment, report) if app.config.broker.encrypt_errors else report
    try:
        return report._replace(
            result_json=_encrypted_result(payloads, assignment, report.result_json),
            error_message=payloads.encrypt_message(report.error_message),
        )
    except Exception as raised:  # by the codec of the application
        return _unstorable(assignment, report, raised)


def _without_reason(assignment: Assignment, report: ChildReport) -> ChildReport:
    """The report of a call that does not fit, without the reason: it may quote a validator of the application
    or the keys of a dict, and the database reads it.
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


def _unstorable(assignment: Assignment, report: ChildReport, raised: Exception) -> ChildReport:
    """The report of a task whose outcome the codec cannot encrypt. It quotes nothing confidential."""
    code = OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    message = (
        f"The result of task {assignment.task_name!r} cannot be stored: the codec of the worker's "
        f"PostgresConfig raised {type(raised.__cause__ or raised).__name__} when it encrypted it."
    )
    log_safely(logger, logging.ERROR, "%s", message, error=raised)
    error = TaskError(error_code=code, message=message)
    return report._replace(
        ok=False,
        result_json=encode_task_error(error),
        error_code=code.value,
        error_message=message,
    )


def encrypted_result(config: AppConfig, assignment: Assignment, result_json: str) -> str:
    """Return a result as it is stored."""
    payloads = Payloads.of(config.broker)
    if payloads is None:
        return result_json
    return _encrypted_result(payloads, assignment, result_json)


def _encrypted_result(payloads: Payloads, assignment: Assignment, result_json: str) -> str:
    node = assignment.node
    by_element = node is not None and (
        assignment.task_name == SIGNAL_TASK or is_mapped(node.inputs_json)
    )
    return payloads.encrypt_result(result_json, by_element=by_element)
