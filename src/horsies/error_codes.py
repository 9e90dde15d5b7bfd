"""Error codes: the built-in TaskError codes, in four families, and the rules for users' own codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import TypeAlias

# Task lists search these columns by code, so they are indexed, and an index rejects long texts.
STORED_CODE_CHARACTERS_MAX = 200

_CODE_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


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
    TRANSACTION_LOST = "TRANSACTION_LOST"
    TRANSACTION_CONFLICT = "TRANSACTION_CONFLICT"
    TRANSACTION_NOT_COMMITTED = "TRANSACTION_NOT_COMMITTED"


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
    """The task or workflow ended without returning a result."""

    TASK_CANCELLED = "TASK_CANCELLED"
    TASK_EXPIRED = "TASK_EXPIRED"
    TASK_TIMEOUT = "TASK_TIMEOUT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
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
    """Return the built-in member with that name, or the text itself for a user's code."""
    return BUILTIN_CODE_REGISTRY.get(text, text)


def error_code_text(code: BuiltInTaskCode | str | None) -> str | None:
    """Return a code's plain text, as stored in columns and retry policies."""
    return code.value if isinstance(code, Enum) else code


def column_code(code: str | None) -> str | None:
    """Return a code as stored in the columns of tasks and attempts: a long one is cut, with an ellipsis.

    The stored result keeps the whole code, and retry policies compare the whole code.
    """
    if code is None or len(code) <= STORED_CODE_CHARACTERS_MAX:
        return code
    return code[: STORED_CODE_CHARACTERS_MAX - 3] + "..."  # every database encoding has a dot


def resolve_exception_code(
    exception: BaseException,
    task_mapper: Mapping[type[BaseException], str] | None,
    app_mapper: Mapping[type[BaseException], str] | None,
    task_default: str | None,
    app_default: str | None,
) -> BuiltInTaskCode | str:
    """Return the code that an exception stands for; the task's settings take precedence over the app's.

    A mapped class covers its subclasses too; among several, the nearest in the exception's MRO wins.
    """
    for mapper in (task_mapper, app_mapper):
        for kind in type(exception).__mro__ if mapper else ():
            if mapper and issubclass(kind, BaseException) and kind in mapper:
                return resolve_code(mapper[kind])
    return resolve_code(task_default or app_default or OperationalErrorCode.UNHANDLED_EXCEPTION)


def validate_error_code_name(code: object, *, where: str = "the error code") -> list[str]:
    """Return the problems of an error code as sentences; an empty list if it is well formed."""
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
    """Return the problems of an exception mapper as sentences; an empty list if it is valid."""
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
    """Return, as sentences, the places where the user's configuration uses the name of a built-in code."""
    problems = [
        f"exception_mapper[{kind.__name__}] uses the built-in code {error_code_text(code)}"
        for kind, code in mapper.items()
        if error_code_text(code) in BUILTIN_CODE_REGISTRY
    ]
    default = error_code_text(default_code)
    if default in BUILTIN_CODE_REGISTRY and default != "UNHANDLED_EXCEPTION":
        problems.append(f"default_unhandled_error_code uses the built-in code {default}")
    return problems
