"""Error codes: the built-in TaskError codes, in four families, and the rules for users' own codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import TypeAlias

# Lists of tasks filter these indexed columns by code, and an index rejects long texts.
STORED_CODE_CHARACTERS_MAX = 200

_CODE_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class OperationalErrorCode(StrEnum):
    """The attempt failed in user code, or in the library code around it."""

    UNHANDLED_EXCEPTION = "UNHANDLED_EXCEPTION"
    """The function raised an exception that no mapper handles."""
    TASK_EXCEPTION = "TASK_EXCEPTION"
    """A function annotated ``-> TaskResult[...]`` returned something else, or code around it (such as a
    validator) raised ``SystemExit`` or another exception that is not an ``Exception``.
    """
    RETRY_LATER = "RETRY_LATER"
    """The function raised RetryLater and has no retries left."""
    WORKER_CRASHED = "WORKER_CRASHED"
    """The process running the task died, or its worker is gone; the message has the exit code or signal."""
    WORKER_STOPPED = "WORKER_STOPPED"
    """The worker was stopped before the task ended."""
    BROKER_ERROR = "BROKER_ERROR"
    """The result could not be read from the database; the task itself may have succeeded."""
    WORKER_RESOLUTION_ERROR = "WORKER_RESOLUTION_ERROR"
    """No worker of the queue has had a task with this name for ``unknown_task_grace_ms``."""
    WORKER_SERIALIZATION_ERROR = "WORKER_SERIALIZATION_ERROR"
    """The stored arguments do not fit the function, or its result cannot be stored unchanged."""
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    """The result is larger than ``payload.max_result_bytes``, which is unlimited by default; a node
    takes more than ``payload.max_input_bytes`` from other nodes; a map has more than
    ``payload.max_map_items`` items; or a step or a child of a durable function returns more than 1 MB.
    """
    PAYLOAD_UNREADABLE = "PAYLOAD_UNREADABLE"
    """The payload is encrypted with a key, or kept in a store, that this process does not have. A worker
    holds such a task until a worker with the key or the store takes it; a program cannot read the
    result.
    """
    RESULT_DESERIALIZATION_ERROR = "RESULT_DESERIALIZATION_ERROR"
    """The stored result is damaged."""
    WORKFLOW_ENQUEUE_FAILED = "WORKFLOW_ENQUEUE_FAILED"
    """The task of a workflow's node, or its sub-workflow, could not be created."""
    SUBWORKFLOW_LOAD_FAILED = "SUBWORKFLOW_LOAD_FAILED"
    """No worker of the queue has had a workflow definition with this key for ``unknown_task_grace_ms``."""
    TRANSACTION_LOST = "TRANSACTION_LOST"
    """The session of the task's transaction was lost before COMMIT; none of the changes was stored."""
    TRANSACTION_CONFLICT = "TRANSACTION_CONFLICT"
    """The task's transaction had a serialization failure or a deadlock and was rolled back."""
    TRANSACTION_NOT_COMMITTED = "TRANSACTION_NOT_COMMITTED"
    """The task ended its transaction itself, or left it in a state in which it cannot commit."""


class ContractCode(StrEnum):
    """A value does not fit the type that its task declares."""

    RETURN_TYPE_MISMATCH = "RETURN_TYPE_MISMATCH"
    """The function returned a value that does not have the declared type."""
    PYDANTIC_HYDRATION_ERROR = "PYDANTIC_HYDRATION_ERROR"
    """The stored result no longer fits the declared type."""
    WORKFLOW_CTX_MISSING_ID = "WORKFLOW_CTX_MISSING_ID"
    """A result was requested with a node that does not belong to a workflow."""
    BATCH_RESULT_MISMATCH = "BATCH_RESULT_MISMATCH"
    """A batched function did not return one outcome for each of its tasks; all of them fail."""


class RetrievalCode(StrEnum):
    """The result could not be read; the task itself may have succeeded."""

    WAIT_TIMEOUT = "WAIT_TIMEOUT"
    """The task or run had not ended after ``timeout_ms``; for a task, the message contains the first
    obstacle from `horsies explain`.
    """
    TASK_NOT_FOUND = "TASK_NOT_FOUND"
    """There is no task with this id."""
    WORKFLOW_NOT_FOUND = "WORKFLOW_NOT_FOUND"
    """There is no run with this id."""
    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    """The run has no node with this id."""
    RESULT_NOT_AVAILABLE = "RESULT_NOT_AVAILABLE"
    """The task ended without a stored result, or the handle has no connection."""
    RESULT_NOT_READY = "RESULT_NOT_READY"
    """A check with ``timeout_ms=0`` found the task or run unfinished, or a node has no result yet."""
    RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
    """The result of a run or node is larger than 1 GiB; read its items by the ids of their tasks."""
    EVENT_LOOP_RUNNING = "EVENT_LOOP_RUNNING"
    """``get`` would have blocked the event loop that runs in this thread; await ``get_async``."""


class OutcomeCode(StrEnum):
    """The task or workflow ended without returning a result."""

    TASK_CANCELLED = "TASK_CANCELLED"
    """The task was cancelled."""
    TASK_EXPIRED = "TASK_EXPIRED"
    """The task had not started by its ``good_until``."""
    TASK_TIMEOUT = "TASK_TIMEOUT"
    """The task ran longer than its ``timeout_ms``."""
    STEP_TIMEOUT = "STEP_TIMEOUT"
    """A step of a durable function ran longer than its ``timeout_ms``."""
    DURABLE_MISMATCH = "DURABLE_MISMATCH"
    """The code of a durable function no longer matches its recorded steps; the run is held, and no
    attempt is counted.
    """
    MEMORY_LIMIT = "MEMORY_LIMIT"
    """The task's process used more memory than its ``memory_limit_mb``."""
    WORKFLOW_PAUSED = "WORKFLOW_PAUSED"
    """The run is paused; it continues when it is resumed."""
    WORKFLOW_FAILED = "WORKFLOW_FAILED"
    """The run failed, but no node recorded an error."""
    WORKFLOW_CANCELLED = "WORKFLOW_CANCELLED"
    """The run was cancelled."""
    WORKFLOW_EXPIRED = "WORKFLOW_EXPIRED"
    """The run was paused for longer than ``paused_workflow_auto_cancel_after``."""
    SIGNAL_TIMEOUT = "SIGNAL_TIMEOUT"
    """No signal arrived in time."""
    MAP_ITEMS_FAILED = "MAP_ITEMS_FAILED"
    """Tasks of a map node failed; ``data`` lists them."""
    UPSTREAM_SKIPPED = "UPSTREAM_SKIPPED"
    """The node was skipped, so it has no result."""
    SUBWORKFLOW_FAILED = "SUBWORKFLOW_FAILED"
    """The sub-workflow's run ended without success."""
    WORKFLOW_SUCCESS_CASE_NOT_MET = "WORKFLOW_SUCCESS_CASE_NOT_MET"
    """The run ended without fulfilling any case of its success policy."""


BuiltInTaskCode: TypeAlias = OperationalErrorCode | ContractCode | RetrievalCode | OutcomeCode
"""A member of one of the four families of built-in error codes."""

BUILTIN_CODE_REGISTRY: dict[str, BuiltInTaskCode] = {
    code.value: code
    for family in (OperationalErrorCode, ContractCode, RetrievalCode, OutcomeCode)
    for code in family
}
"""The built-in codes by their text."""


def resolve_code(text: str) -> BuiltInTaskCode | str:
    """Return the built-in member with this name, or the text itself for a user's code."""
    return BUILTIN_CODE_REGISTRY.get(text, text)


def error_code_text(code: BuiltInTaskCode | str | None) -> str | None:
    """Return a code as plain text, the form that columns and retry policies store."""
    return code.value if isinstance(code, Enum) else code


def docs_command(code: BuiltInTaskCode | str | None) -> str | None:
    """Return the command that prints the meaning and the remedy of a built-in code; None for another code."""
    text = error_code_text(code)
    return f"horsies docs {text}" if text in BUILTIN_CODE_REGISTRY else None


def column_code(code: str | None) -> str | None:
    """Return a code in the form for the columns of tasks and attempts: a long code is shortened with an
    ellipsis. Stored results and retry policies use the whole code.
    """
    if code is None or len(code) <= STORED_CODE_CHARACTERS_MAX:
        return code
    # Dots instead of "…", because every encoding has dots.
    return code[: STORED_CODE_CHARACTERS_MAX - 3] + "..."


def resolve_exception_code(
    exception: BaseException,
    task_mapper: Mapping[type[BaseException], str] | None,
    app_mapper: Mapping[type[BaseException], str] | None,
    task_default: str | None,
    app_default: str | None,
) -> BuiltInTaskCode | str:
    """Return the error code for an exception; the task's settings take precedence over the application's.

    A mapped class covers its subclasses too; if several classes match, the nearest in the exception's
    MRO wins.
    """
    for mapper in (task_mapper, app_mapper):
        for kind in type(exception).__mro__ if mapper else ():
            if mapper and issubclass(kind, BaseException) and kind in mapper:
                return resolve_code(mapper[kind])
    return resolve_code(task_default or app_default or OperationalErrorCode.UNHANDLED_EXCEPTION)


def validate_error_code_name(code: object, *, where: str = "the error code") -> list[str]:
    """Return the problems of an error code as sentences, or an empty list if it is well formed."""
    if not isinstance(code, str):
        return [f"{where} must be a string such as GATEWAY_DOWN, not {type(code).__name__}"]
    text = error_code_text(code) or ""
    if _CODE_NAME.fullmatch(text):
        return []
    if text.endswith(("Error", "Exception")):
        return [
            f"{where} {text!r} looks like an exception class; "
            "map the class to a code with exception_mapper and name that code"
        ]
    return [
        f"{where} {text!r} must be an upper case name such as GATEWAY_DOWN "
        "(letters A-Z, digits and _, starting with a letter)"
    ]


def validate_exception_mapper(mapper: object, *, where: str = "exception_mapper") -> list[str]:
    """Return the problems of an exception mapper as sentences, or an empty list if it is valid."""
    if not isinstance(mapper, Mapping):
        return [
            f"{where} must be a dictionary from exception classes to codes, "
            f"not {type(mapper).__name__}"
        ]
    problems: list[str] = []
    for key, code in mapper.items():
        if isinstance(key, type) and issubclass(key, BaseException):
            problems += validate_error_code_name(code, where=f"{where}[{key.__name__}]")
        else:
            problems.append(f"{where} maps {key!r}, which is not an exception class")
    return problems


def reserved_code_collisions(
    mapper: Mapping[type[BaseException], str], default_code: str | None
) -> list[str]:
    """Return, as sentences, the places where the user's configuration uses a built-in error code's name."""
    problems = [
        f"exception_mapper[{kind.__name__}] uses the built-in code {error_code_text(code)}"
        for kind, code in mapper.items()
        if error_code_text(code) in BUILTIN_CODE_REGISTRY
    ]
    default = error_code_text(default_code)
    if default in BUILTIN_CODE_REGISTRY and default != "UNHANDLED_EXCEPTION":
        problems.append(f"default_unhandled_error_code uses the built-in code {default}")
    return problems
