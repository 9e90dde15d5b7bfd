"""The built-in error codes of TaskError, in four families."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TypeAlias

# The columns that lists of tasks search by code are indexed, and an index refuses long texts.
STORED_CODE_CHARACTERS_MAX = 200


class OperationalErrorCode(StrEnum):
    """The attempt failed in user code or in the library around it."""

    UNHANDLED_EXCEPTION = "UNHANDLED_EXCEPTION"
    TASK_EXCEPTION = "TASK_EXCEPTION"
    RETRY_LATER = "RETRY_LATER"
    WORKER_CRASHED = "WORKER_CRASHED"
    WORKER_STOPPED = "WORKER_STOPPED"
    BROKER_ERROR = "BROKER_ERROR"
    WORKER_RESOLUTION_ERROR = "WORKER_RESOLUTION_ERROR"
    WORKER_SERIALIZATION_ERROR = "WORKER_SERIALIZATION_ERROR"
    PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
    RESULT_DESERIALIZATION_ERROR = "RESULT_DESERIALIZATION_ERROR"
    WORKFLOW_ENQUEUE_FAILED = "WORKFLOW_ENQUEUE_FAILED"
    SUBWORKFLOW_LOAD_FAILED = "SUBWORKFLOW_LOAD_FAILED"


class ContractCode(StrEnum):
    """A value does not fit the type its task declares."""

    RETURN_TYPE_MISMATCH = "RETURN_TYPE_MISMATCH"
    PYDANTIC_HYDRATION_ERROR = "PYDANTIC_HYDRATION_ERROR"
    WORKFLOW_CTX_MISSING_ID = "WORKFLOW_CTX_MISSING_ID"


class RetrievalCode(StrEnum):
    """The result could not be read; the task itself may be fine."""

    WAIT_TIMEOUT = "WAIT_TIMEOUT"
    TASK_NOT_FOUND = "TASK_NOT_FOUND"
    WORKFLOW_NOT_FOUND = "WORKFLOW_NOT_FOUND"
    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    RESULT_NOT_AVAILABLE = "RESULT_NOT_AVAILABLE"
    RESULT_NOT_READY = "RESULT_NOT_READY"
    RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
    EVENT_LOOP_RUNNING = "EVENT_LOOP_RUNNING"


class OutcomeCode(StrEnum):
    """The task or workflow ended without returning by itself."""

    TASK_CANCELLED = "TASK_CANCELLED"
    TASK_EXPIRED = "TASK_EXPIRED"
    TASK_TIMEOUT = "TASK_TIMEOUT"
    WORKFLOW_PAUSED = "WORKFLOW_PAUSED"
    WORKFLOW_FAILED = "WORKFLOW_FAILED"
    WORKFLOW_CANCELLED = "WORKFLOW_CANCELLED"
    WORKFLOW_EXPIRED = "WORKFLOW_EXPIRED"
    SIGNAL_TIMEOUT = "SIGNAL_TIMEOUT"
    MAP_ITEMS_FAILED = "MAP_ITEMS_FAILED"
    UPSTREAM_SKIPPED = "UPSTREAM_SKIPPED"
    SUBWORKFLOW_FAILED = "SUBWORKFLOW_FAILED"
    WORKFLOW_SUCCESS_CASE_NOT_MET = "WORKFLOW_SUCCESS_CASE_NOT_MET"


BuiltInTaskCode: TypeAlias = OperationalErrorCode | ContractCode | RetrievalCode | OutcomeCode

BUILTIN_CODE_REGISTRY: dict[str, BuiltInTaskCode] = {
    code.value: code
    for family in (OperationalErrorCode, ContractCode, RetrievalCode, OutcomeCode)
    for code in family
}


def resolve_code(text: str) -> BuiltInTaskCode | str:
    """Return the built-in member of that name, or the text itself for a user's code."""
    return BUILTIN_CODE_REGISTRY.get(text, text)


def error_code_text(code: BuiltInTaskCode | str | None) -> str | None:
    """Return the plain text of a code, as columns and retry policies hold it."""
    return code.value if isinstance(code, Enum) else code


def column_code(code: str | None) -> str | None:
    """Return a code as the columns of tasks and attempts hold it: a long one is cut, with an ellipsis.

    The stored result keeps the whole code, and retry policies compare the whole code.
    """
    if code is None or len(code) <= STORED_CODE_CHARACTERS_MAX:
        return code
    return code[: STORED_CODE_CHARACTERS_MAX - 3] + "..."  # every encoding of a database has dots
