"""The arguments of a node's task: its own arguments, and results of other nodes.

Another node's result becomes an argument, decoded by the parameter's annotation, or a member of the
context. If the stored result cannot be read, a parameter that takes a whole result receives an error
result, and the task still runs. A parameter that takes only the value needs a value that fits; otherwise
the task does not run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from horsies.app import Horsies
from horsies.codec.calls import BoundCall, CallSignature
from horsies.codec.form import CodecError
from horsies.codec.results import ResultCodec, decode_untyped, split_result
from horsies.error_codes import OperationalErrorCode, RetrievalCode
from horsies.result import Err, Ok, Result
from horsies.task_result import TaskError, TaskResult
from horsies.worker.protocol import Assignment, NodeInput, NodePart
from horsies.workflow.definition import definition_by_key
from horsies.workflow.nodes.context import UpstreamResult, WorkflowContext, WorkflowMeta
from horsies.workflow.nodes.nodes import codec_for
from horsies.workflow.nodes.type_compat import (
    UNKNOWN_TYPE,
    admits_none,
    takes_item_results,
    takes_value,
)

_NO_INPUTS: Mapping[str, Any] = {"args": {}, "context": {}}
_CORRUPT_INPUTS = CodecError("The stored inputs of this node are not a JSON object.", "")


def build_call(
    app: Horsies, assignment: Assignment, signature: CallSignature, kwargs_json: str
) -> Result[BoundCall, CodecError]:
    """Return a node's call: its own arguments, other nodes' results, context and meta.

    If a source has not ended, because the join did not wait for it, its parameter is omitted. A required
    parameter receives an error result in this case: its source had ended and is now being retried.
    """
    node = assignment.node
    assert node is not None
    sources = {source.task_index: source for source in node.sources}
    try:
        stored = _NO_INPUTS if node.inputs_json is None else from_json(node.inputs_json)
        args, context = stored["args"], stored["context"]
        taken = {name: (index, sources.get(index)) for name, index in args.items()}
        members = {
            node_id: sources[index] for node_id, index in context.items() if index in sources
        }
        if element := stored.get("element"):
            kwargs_json = _with_value_of(kwargs_json, signature, element)
    except (ValueError, TypeError, KeyError, AttributeError):
        return Err(_CORRUPT_INPUTS)
    given = signature.decode_keywords(kwargs_json)
    if isinstance(given, Err):
        return given
    results: dict[str, Any] = {}
    for name, (index, source) in taken.items():
        argument = _argument(signature, name, index, source)
        if isinstance(argument, Err):
            return argument
        results.update(argument.value)
    injected = _injected(app, assignment, node, signature, members)
    return signature.complete_call({**given.value, **results}, injected)


def _with_value_of(kwargs_json: str, signature: CallSignature, element: str) -> str:
    """Return the stored arguments of an item of a map over a map.

    The element, which is a stored result, is replaced by the value in that result. A failed item has no
    value, so its element becomes null, which fits only an annotation that allows None.
    """
    if not takes_value(signature.annotation_of(element)):
        return kwargs_json
    kwargs = from_json(kwargs_json)
    return to_json({**kwargs, element: kwargs[element].get("ok")}).decode()


def _argument(
    signature: CallSignature, name: str, index: int, source: NodeInput | None
) -> Result[dict[str, Any], CodecError]:
    """Return a mapping from a parameter's name to its argument, or an empty one if its default applies."""
    annotation = signature.annotation_of(name)
    if takes_value(annotation):
        return _value(signature, name, annotation, source)
    if source is not None:
        return Ok({name: _result(signature, name, source)})
    if name not in signature.names.required:
        return Ok({})
    message = "Another node whose result this one takes is being retried."
    return Ok({name: _error_result(RetrievalCode.RESULT_NOT_READY, message, index)})


def _value(
    signature: CallSignature, name: str, annotation: Any, source: NodeInput | None
) -> Result[dict[str, Any], CodecError]:
    """Return a node's value as an argument.

    For a node that failed or was skipped, the argument is None if the annotation allows it; otherwise the
    parameter's default applies. If a stored value does not fit, it was written for another release of the
    function.
    """
    side, text = ("err", "") if source is None else split_result(source.result) or ("", "")
    if source is not None and side == "ok":
        if source.kind == "map" and not takes_item_results(annotation):
            text = to_json([item.get("ok") for item in from_json(text)]).decode()
        return signature.decode_keywords(f"{{{json.dumps(name)}:{text}}}")
    if side != "err":
        return Err(CodecError(f"the source node of parameter {name!r} has no stored result", name))
    has_default = name not in signature.names.required
    if admits_none(annotation) and (source is not None or not has_default):
        return Ok({name: None})
    if has_default:
        return Ok({})
    message = (
        f"parameter {name!r} takes the value of another node, which has none: it failed, was skipped "
        "or is being retried; a parameter annotated TaskResult takes its error"
    )
    return Err(CodecError(message, name))


def _result(signature: CallSignature, name: str, source: NodeInput) -> TaskResult[Any, Any]:
    decoded = signature.decode_keywords(f"{{{json.dumps(name)}:{source.result}}}")
    if isinstance(decoded, Err):
        return _unreadable(source, decoded.value)
    result = decoded.value.get(name)
    if isinstance(result, TaskResult):
        return result
    untyped = decode_untyped(source.result)  # the parameter takes any value
    return untyped.value if isinstance(untyped, Ok) else _unreadable(source, untyped.value)


def _unreadable(source: NodeInput, problem: CodecError) -> TaskResult[Any, TaskError]:
    message = f"The result of another node cannot be read: {problem.message}"
    code = OperationalErrorCode.RESULT_DESERIALIZATION_ERROR
    return _error_result(code, message, source.task_index)


def _error_result(
    code: OperationalErrorCode | RetrievalCode, message: str, index: int
) -> TaskResult[Any, TaskError]:
    data = {"dependency_index": index}
    return TaskResult(err=TaskError(error_code=code, message=message, data=data))


def _injected(
    app: Horsies,
    assignment: Assignment,
    node: NodePart,
    signature: CallSignature,
    context: Mapping[str, NodeInput],
) -> dict[str, Any]:
    place = (node.workflow_id, node.task_index, assignment.task_name)
    injected: dict[str, Any] = {}
    if "workflow_meta" in signature.injected:
        injected["workflow_meta"] = WorkflowMeta(*place)
    if context and "workflow_ctx" in signature.injected:
        results = {
            node_id: UpstreamResult(source.result, source.sub_workflow_summary, _codec(app, source))
            for node_id, source in context.items()
        }
        injected["workflow_ctx"] = WorkflowContext(*place, results)
    return injected


def _codec(app: Horsies, source: NodeInput) -> ResultCodec | None:
    """Return the codec for a result that the context returns by key; None for plain JSON."""
    if source.sub_definition_key is not None:
        child = definition_by_key(source.sub_definition_key)
        declared = UNKNOWN_TYPE if child is None else child.output_type()
        return None if declared is UNKNOWN_TYPE else codec_for(declared)
    task = app.get_task(source.task_name)
    if task is None:
        return None
    results = task.definition.results
    if source.kind != "map":
        return results
    item = results.ok_type
    return codec_for(list[TaskResult[item, TaskError]])  # type: ignore[valid-type]
