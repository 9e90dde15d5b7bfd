"""Routing: which queue a node's task goes to, and with which priority.

Every application has its own queues, so the answer is known only when an application builds the
workflow. Stands before the line producer -> SQL -> turn -> child -> report -> result.
"""

from __future__ import annotations

from dataclasses import dataclass

from horsies.config.app import AppConfig, QueueMode
from horsies.errors import ConfigurationError, ErrorCode
from horsies.tasks.definition import choose_queue
from horsies.workflow.nodes.nodes import MapNode, TaskNode


@dataclass(frozen=True, slots=True)
class Route:
    """A queue and the priority in it."""

    queue_name: str
    priority: int


class Router:
    """The queues of one application, asked once for every node."""

    __slots__ = ("_config", "_queues", "internal")

    def __init__(self, config: AppConfig) -> None:
        queues = config.queues()
        self._config = config
        self._queues = {queue.name: Route(queue.name, queue.priority) for queue in queues}
        # Sub-workflows, sleeps and signals are the library's own work: they go where workers look
        # first. A queue with a cap of 0 is paused and would hold them up.
        served = [queue for queue in queues if queue.max_concurrency != 0] or queues
        self.internal = self._queues[served[0].name]

    def route(self, node: TaskNode[object] | MapNode[object]) -> Route | ConfigurationError:
        """Return where the node's task goes, or why it can go nowhere."""
        route = self._queue(node)
        if isinstance(route, Route) and node.priority is not None:
            return Route(route.queue_name, node.priority)
        return route

    def _queue(self, node: TaskNode[object] | MapNode[object]) -> Route | ConfigurationError:
        known = self._queues.get(node.queue or node.fn.definition.queue_name)
        if known is not None:
            return known
        if node.queue is None:
            return self._foreign_task(node)
        try:
            return self._queues[choose_queue(self._config, node.queue, None).name]
        except ConfigurationError as error:
            return error

    def _foreign_task(self, node: TaskNode[object] | MapNode[object]) -> ConfigurationError:
        custom = self._config.queue_mode is QueueMode.CUSTOM
        code = ErrorCode.TASK_INVALID_QUEUE if custom else ErrorCode.CONFIG_INVALID_QUEUE_MODE
        return ConfigurationError(
            f"Task {node.name!r} belongs to queue {node.fn.definition.queue_name!r}, which this "
            "application does not have.",
            code=code,
            help_text=f"give the node one of: {', '.join(self._queues)}",
        )
