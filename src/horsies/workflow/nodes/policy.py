"""Policies: the effect of a failed node on its run, and the conditions of success."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from horsies.workflow.nodes.nodes import AnyNode, NodeKey

NodeReference: TypeAlias = "AnyNode | NodeKey[object] | str"


class OnError(StrEnum):
    """The effect of a failed node on its run.

    FAIL lets the graph resolve as far as it can and then fails the run; PAUSE pauses the run at once
    until it is resumed.
    """

    FAIL = "fail"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class SuccessCase:
    """Nodes that make a run a success if they all complete; given by node, key or node id.

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
