"""Policies: what a failed node does to its run, and when a run counts as a success.

Plain values of a specification, checked with it and stored with its run: here that they are what
they should be, in the graph that they name its nodes. Stands before the line producer -> SQL -> turn
-> child -> report -> result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from horsies.errors import ErrorCode, WorkflowValidationError
from horsies.workflow.nodes.nodes import AnyNode, NodeKey, is_list

NodeReference: TypeAlias = "AnyNode | NodeKey[object] | str"


class OnError(StrEnum):
    """What a failed node does to its run.

    FAIL lets the graph resolve as far as it can and then fails the run; PAUSE stops the run at once
    until it is resumed.
    """

    FAIL = "fail"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class SuccessCase:
    """Nodes that together make a run a success; named by node, key or node id.

    Example:
        SuccessCase(required=[charge, ship])
    """

    required: Sequence[NodeReference]


@dataclass(frozen=True, slots=True)
class SuccessPolicy:
    """A run succeeds when all required nodes of any case completed.

    ``optional`` nodes may fail without pausing a run whose ``on_error`` is PAUSE.

    Example:
        SuccessPolicy(cases=[SuccessCase([card]), SuccessCase([invoice])], optional=[newsletter])
    """

    cases: Sequence[SuccessCase]
    optional: Sequence[NodeReference] | None = None


def policy_misfits(workflow_name: str, policy: object) -> Iterator[WorkflowValidationError]:
    """Find a success policy, or parts of one, of another kind than they should be."""
    for problem, help_text in _misfits(policy):
        yield WorkflowValidationError(
            f"The success policy of workflow {workflow_name!r} {problem}.",
            code=ErrorCode.WORKFLOW_INVALID_SUCCESS_POLICY,
            help_text=help_text,
        )


def _misfits(policy: object) -> Iterator[tuple[str, str]]:
    if policy is None:
        return
    if not isinstance(policy, SuccessPolicy):
        yield (
            f"is of type {type(policy).__name__}, not a SuccessPolicy",
            "write SuccessPolicy(cases=[SuccessCase(required=[...])])",
        )
        return
    if not is_list(policy.cases):
        problem = f"has cases of type {type(policy.cases).__name__}, not a list of them"
        yield problem, "write cases=[SuccessCase(...)]"
    else:
        yield from _case_misfits(policy.cases)
    if policy.optional is not None and not is_list(policy.optional):
        problem = f"has an optional of type {type(policy.optional).__name__}, not a list of nodes"
        yield problem, "write optional=[...]"


def _case_misfits(cases: Sequence[object]) -> Iterator[tuple[str, str]]:
    for number, case in enumerate(cases):
        where = f"has a case (number {number})"
        if not isinstance(case, SuccessCase):
            problem = f"{where} of type {type(case).__name__}, not a SuccessCase"
            yield problem, "write SuccessCase(required=[...])"
        elif not is_list(case.required):
            kind = type(case.required).__name__
            problem = f"{where} with a required of type {kind}, not a list of nodes"
            yield problem, "write required=[...]"
