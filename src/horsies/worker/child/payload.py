"""The payload of assignments and reports in a child: decrypted before a task runs, encrypted after it.

The parent passes texts on as they are stored, so children share the work of encryption. A child that lacks a
key reports it without calling the function, and the worker holds the task.
"""

from __future__ import annotations

from horsies.app import Horsies
from horsies.codec.results import encode_task_error
from horsies.config.app import AppConfig
from horsies.encryption import Payloads, missing_key
from horsies.error_codes import OperationalErrorCode
from horsies.task_result import TaskError
from horsies.worker.protocol import Assignment, ChildReport
from horsies.workflow.build.plan import EXPAND_TASK, SIGNAL_TASK, is_mapped


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
    return assignment if key_id is None else unreadable(assignment, key_id)


def unreadable(assignment: Assignment, key_id: str) -> ChildReport:
    """The report of a task whose payload needs a key that this application does not have."""
    code = OperationalErrorCode.PAYLOAD_UNREADABLE
    message = (
        f"The payload of task {assignment.task_name!r} is encrypted with key {key_id}, which this worker "
        "does not have; add the key to the codec of the worker's PostgresConfig."
    )
    error = TaskError(error_code=code, message=message, data={"key_id": key_id})
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
    if payloads is None or is_plan or not report.was_called or not report.result_json:
        return report
    return report._replace(
        result_json=_encrypted_result(payloads, assignment, report.result_json),
        error_message=payloads.encrypt_message(report.error_message),
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
