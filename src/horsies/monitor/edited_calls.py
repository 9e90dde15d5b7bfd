"""Pure functions that edit the arguments of finished tasks, checked against the task's parameters before
a send. Arguments are edited by name, including arguments that were passed by position. If secret values
are hidden from the viewer, unedited parts are taken from the stored call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from horsies.codec.calls import CallSignature, EncodedCall
from horsies.config.app import PayloadConfig
from horsies.db.statements.monitor import TaskDetail
from horsies.result import Err
from horsies.tasks.definition import RESERVED_PREFIX, TaskDefinition
from horsies.tasks.request import encode


class EditProblem(ValueError):
    """The reason why arguments cannot be sent, as a sentence."""


def named_arguments(signature: CallSignature, task: TaskDetail) -> dict[str, Any]:
    """Return a stored call's arguments by name, for editing."""
    _refuse_reserved(task.task_name)
    try:
        args, kwargs = json.loads(task.args or "[]"), json.loads(task.kwargs or "{}")
    except (ValueError, RecursionError):
        raise EditProblem(f"The stored arguments of task {task.id} are not JSON.") from None
    names = signature.names.positional
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise EditProblem(f"The stored arguments of task {task.id} are not a call.")
    if len(args) > len(names) or any(name not in signature.names.spots for name in names):
        raise EditProblem(
            f"Task {task.id} has arguments without names, which cannot be edited; send a new task."
        )
    return dict(zip(names, args, strict=False)) | kwargs


def edited_call(
    limits: PayloadConfig,
    definition: TaskDefinition,
    task: TaskDetail,
    arguments: Mapping[str, Any],
) -> EncodedCall:
    """Return a task's call with these arguments; raise EditProblem if they do not fit the parameters.
    The argument that determines the task's key cannot be edited, because the key decides the task's
    place among other tasks.
    """
    signature = definition.signature
    kwargs = checked_arguments(definition, arguments)
    encoded = encode(limits, definition, (), kwargs)
    if isinstance(encoded, Err):
        raise EditProblem(_sentence(encoded.err_value.message))
    if definition.key is not None:
        before = signature.decode_call(task.args or "[]", task.kwargs or "{}")
        is_same = not isinstance(before, Err) and definition.key.of_call(
            before.value.args, before.value.kwargs
        ) == definition.key.of_call((), kwargs)
        if not is_same:
            raise EditProblem("The key of a task cannot be edited; send a new task instead.")
    return encoded.value


def checked_arguments(definition: TaskDefinition, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON arguments as the values of a call by name; raise EditProblem if they do not fit."""
    _refuse_reserved(definition.name)
    signature = definition.signature
    if (misfit := signature.names.misfit(0, arguments)) is not None:
        fault = misfit[1]
        raise EditProblem(
            f"{fault[0].upper()}{fault[1:]}; the parameters are {signature.names.shown}."
        )
    bound = signature.decode_call("[]", json.dumps(arguments))
    if isinstance(bound, Err):
        raise EditProblem(_sentence(bound.err_value.message))
    return {name: value for name, value in bound.value.kwargs.items() if name in arguments}


def is_reserved(task_name: str) -> bool:
    """Return whether a task belongs to horsies itself. Its argument is an event that a worker signs."""
    return task_name.startswith(RESERVED_PREFIX)


def _refuse_reserved(task_name: str) -> None:
    if is_reserved(task_name):
        raise EditProblem(
            f"Task {task_name!r} belongs to horsies itself, so people do not choose its arguments; "
            "retry it as it is."
        )


def _sentence(message: str) -> str:
    return message if message.endswith(".") else f"{message}."


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments that differ, for the record of the change."""
    names = sorted(before.keys() | after.keys())
    return [
        one for one in names if one not in before or one not in after or before[one] != after[one]
    ]


def edit_reason(names: Sequence[str], reason: str | None) -> str:
    """Return the reason to record for a send with edited arguments: the arguments' names, and the
    author's reason.
    """
    edited = f"edited {', '.join(names)}" if names else "nothing edited"
    return f"{edited}: {reason}" if reason else edited


def unmasked(given: Any, shown: Any, stored: Any) -> Any:
    """Return the edited values; replace each part that equals the shown value by the stored value.

    Example:
        >>> unmasked({"a": 2, "card": "hidden"}, {"a": 1, "card": "hidden"}, {"a": 1, "card": 4111})
        {'a': 2, 'card': 4111}
    """
    if given == shown:
        return stored
    match given, shown, stored:
        case dict(), dict(), dict():
            return {
                key: unmasked(value, shown[key], stored[key])
                if key in shown and key in stored
                else value
                for key, value in given.items()
            }
        case list(), list(), list() if len(given) == len(shown) == len(stored):
            parts = zip(given, shown, stored, strict=True)
            return [unmasked(*part) for part in parts]
        case _:
            return given
