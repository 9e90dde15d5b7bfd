"""Operations: a base class of ``Horsies`` with the methods that read and control stored tasks, queues
and workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from horsies.db.statement import Script, one_or_none
from horsies.modules import Deferred
from horsies.monitor.defaults import LIMIT_DEFAULT, PING_TIMEOUT_SECONDS
from horsies.result import Err, Result
from horsies.states import SignalDelivery
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import BrokerResult, PostgresBroker
from horsies.tasks.definition import TaskDefinition
from horsies.tasks.handle import TaskActionError, TaskCancelled, TaskHandle, TaskInfo

if TYPE_CHECKING:
    from horsies.db.statements.monitor import QueueState, WorkerStateSnapshot
    from horsies.durable import handle as durable_runs
    from horsies.durable.handle import DurableHandle
    from horsies.monitor import actions, health, keys, queries
    from horsies.monitor.actions import QueueOrder, TaskRetried
    from horsies.monitor.diagnose import explain
    from horsies.monitor.diagnose.explain import Explanation
    from horsies.monitor.health import DatabasePing, WorkerPong
    from horsies.monitor.keys import Keys
    from horsies.monitor.queries import OneOrMore, RunPage, TaskPage
else:
    durable_runs = Deferred("horsies.durable.handle")
    actions = Deferred("horsies.monitor.actions")
    explain = Deferred("horsies.monitor.diagnose.explain")
    health = Deferred("horsies.monitor.health")
    keys = Deferred("horsies.monitor.keys")
    queries = Deferred("horsies.monitor.queries")


class Operations(ABC):
    """The methods that read and control an application's stored tasks, queues and workers."""

    @abstractmethod
    def get_broker(self) -> PostgresBroker:
        """Return the application's broker."""

    @abstractmethod
    def are_sends_suppressed(self) -> bool:
        """Return whether this process's sends are suppressed."""

    @abstractmethod
    def get_valid_queue_names(self) -> list[str]:
        """Return the names of the configured queues."""

    @abstractmethod
    def definitions(self) -> Mapping[str, TaskDefinition]:
        """Return the definitions of the registered tasks by name."""

    # Reading results by id

    def handle(self, task_id: str, task_name: str | None = None) -> TaskHandle[Any]:
        """Return a handle for a task that was sent elsewhere; with ``task_name``, its result is typed."""
        definition = self.definitions().get(task_name) if task_name else None
        results = definition.results if definition else None
        return TaskHandle(task_id, self.get_broker(), results)

    def get_result(self, task_id: str, timeout_ms: int | None = None) -> TaskResult[Any, TaskError]:
        """Wait for a task's result by its id; see ``TaskHandle.get``."""
        return self.handle(task_id).get(timeout_ms)

    async def get_result_async(
        self, task_id: str, timeout_ms: int | None = None
    ) -> TaskResult[Any, TaskError]:
        """Run ``get_result`` without blocking the event loop."""
        return await self.handle(task_id).get_async(timeout_ms)

    def get_task_info(
        self,
        task_id: str,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """Describe a task by its id; see ``TaskHandle.info``."""
        return self.handle(task_id).info(
            include_result=include_result,
            include_failed_reason=include_failed_reason,
            include_attempts=include_attempts,
        )

    async def get_task_info_async(
        self,
        task_id: str,
        *,
        include_result: bool = False,
        include_failed_reason: bool = False,
        include_attempts: bool = False,
    ) -> BrokerResult[TaskInfo | None]:
        """Run ``get_task_info`` without blocking the event loop."""
        return await self.handle(task_id).info_async(
            include_result=include_result,
            include_failed_reason=include_failed_reason,
            include_attempts=include_attempts,
        )

    def cancel_task(
        self, task_id: str, *, include_running: bool = True
    ) -> Result[TaskCancelled, TaskActionError]:
        """Cancel a task by its id; see ``TaskHandle.cancel``."""
        return self.handle(task_id).cancel(include_running=include_running)

    async def cancel_task_async(
        self, task_id: str, *, include_running: bool = True
    ) -> Result[TaskCancelled, TaskActionError]:
        """Run ``cancel_task`` without blocking the event loop."""
        return await self.handle(task_id).cancel_async(include_running=include_running)

    def retry_task(self, task_id: str) -> Result[TaskRetried, TaskActionError]:
        """Send a finished task's request again as a new task that refers to the old one."""
        return actions.retry_task(
            self.get_broker(), task_id, suppressed=self.are_sends_suppressed()
        )

    async def retry_task_async(self, task_id: str) -> Result[TaskRetried, TaskActionError]:
        """Run ``retry_task`` without blocking the event loop."""
        return await actions.retry_task_async(
            self.get_broker(), task_id, suppressed=self.are_sends_suppressed()
        )

    rerun_task = retry_task
    rerun_task_async = retry_task_async

    # Explanations of missing progress

    def durable_handle(self, task_id: str) -> DurableHandle:
        """Return a handle for a run of a durable function, to signal, resume, reset or read it."""
        return durable_runs.DurableHandle(task_id, self.get_broker(), self.definitions().get)

    def signal(
        self, task_id: str, name: str, value: object = None
    ) -> Result[SignalDelivery, TaskActionError]:
        """Send a value to a run of a durable function; see ``DurableHandle.signal``.

        Example:
            app.signal(task_id, "approve", Approval(by="ada")).unwrap()
        """
        return self.durable_handle(task_id).signal(name, value)

    def explain(self, row_id: str, node: str | None = None) -> BrokerResult[Explanation]:
        """Explain why the task or run with this id, or a node of the run, is not making progress.

        If there is no such task, run or node, the explanation's ``status`` is None, and its reason
        explains the absence.

        Example:
            for reason in app.explain(handle.task_id).unwrap().reasons:
                print(reason.code, reason.sentence, reason.remedy)
        """
        return explain.explain(self.get_broker(), explain.explain_script(row_id, node))

    async def explain_async(
        self, row_id: str, node: str | None = None
    ) -> BrokerResult[Explanation]:
        """Run ``explain`` without blocking the event loop."""
        return await explain.explain_async(self.get_broker(), explain.explain_script(row_id, node))

    def explain_queue(self, queue_name: str) -> BrokerResult[Explanation]:
        """Explain why a queue's tasks do not start."""
        return explain.explain(self.get_broker(), self._queue_script(queue_name))

    async def explain_queue_async(self, queue_name: str) -> BrokerResult[Explanation]:
        """Run ``explain_queue`` without blocking the event loop."""
        return await explain.explain_async(self.get_broker(), self._queue_script(queue_name))

    def _queue_script(self, queue_name: str) -> Script[Explanation]:
        return explain.explain_queue_script(queue_name, self.get_valid_queue_names())

    def explain_schedule(self, name: str) -> BrokerResult[Explanation]:
        """Explain why a schedule does not send its task or start its workflow."""
        return explain.explain(self.get_broker(), explain.explain_schedule_script(name))

    async def explain_schedule_async(self, name: str) -> BrokerResult[Explanation]:
        """Run ``explain_schedule`` without blocking the event loop."""
        return await explain.explain_async(self.get_broker(), explain.explain_schedule_script(name))

    # Lists of tasks and runs

    def tasks_where(
        self,
        *,
        status: OneOrMore | None = None,
        queue: OneOrMore | None = None,
        name: OneOrMore | None = None,
        error_code: OneOrMore | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = LIMIT_DEFAULT,
        after: str | None = None,
    ) -> BrokerResult[TaskPage]:
        """Return a page of tasks, newest first. Several values of one filter are alternatives.

        ``status`` takes a TaskStatus or its text, in upper or lower case. ``since`` and ``until`` bound
        the send time. ``limit`` is at most 1,000. ``after`` is the previous page's ``next_cursor``.
        An invalid filter results in Err(INVALID_QUERY).

        Example:
            page = app.tasks_where(status="FAILED", queue=["mail", "reports"]).unwrap()
        """
        filters = queries.task_filters(
            status=status,
            queue=queue,
            name=name,
            error_code=error_code,
            since=since,
            until=until,
            limit=limit,
            after=after,
        )
        return filters.and_then(lambda found: queries.list_tasks(self.get_broker(), found))

    async def tasks_where_async(
        self,
        *,
        status: OneOrMore | None = None,
        queue: OneOrMore | None = None,
        name: OneOrMore | None = None,
        error_code: OneOrMore | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = LIMIT_DEFAULT,
        after: str | None = None,
    ) -> BrokerResult[TaskPage]:
        """Run ``tasks_where`` without blocking the event loop."""
        filters = queries.task_filters(
            status=status,
            queue=queue,
            name=name,
            error_code=error_code,
            since=since,
            until=until,
            limit=limit,
            after=after,
        )
        if isinstance(filters, Err):
            return filters
        return await queries.list_tasks_async(self.get_broker(), filters.ok_value)

    def runs_where(
        self,
        *,
        status: OneOrMore | None = None,
        name: OneOrMore | None = None,
        workflow_key: OneOrMore | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        include_children: bool = False,
        limit: int = LIMIT_DEFAULT,
        after: str | None = None,
    ) -> BrokerResult[RunPage]:
        """Return a page of workflow runs, newest first, like ``tasks_where`` for tasks. Runs started by
        other runs are included only with ``include_children``.
        """
        filters = queries.run_filters(
            status=status,
            name=name,
            workflow_key=workflow_key,
            since=since,
            until=until,
            include_children=include_children,
            limit=limit,
            after=after,
        )
        found = filters.and_then(lambda checked: queries.list_runs(self.get_broker(), checked))
        return found.map(queries.page_or_empty)

    async def runs_where_async(
        self,
        *,
        status: OneOrMore | None = None,
        name: OneOrMore | None = None,
        workflow_key: OneOrMore | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        include_children: bool = False,
        limit: int = LIMIT_DEFAULT,
        after: str | None = None,
    ) -> BrokerResult[RunPage]:
        """Run ``runs_where`` without blocking the event loop."""
        filters = queries.run_filters(
            status=status,
            name=name,
            workflow_key=workflow_key,
            since=since,
            until=until,
            include_children=include_children,
            limit=limit,
            after=after,
        )
        if isinstance(filters, Err):
            return filters
        found = await queries.list_runs_async(self.get_broker(), filters.ok_value)
        return found.map(queries.page_or_empty)

    # Queues and workers across the cluster

    def pause_queue(
        self, queue_name: str, *, reason: str | None = None
    ) -> BrokerResult[QueueState]:
        """Stop all workers from claiming a queue's tasks; running tasks continue.

        The reason and the author are recorded; see ``horsies.monitoring.acting_as``.
        """
        order = _order(self, queue_name, paused=True, reason=reason)
        return actions.switch_queue(self.get_broker(), order)

    async def pause_queue_async(
        self, queue_name: str, *, reason: str | None = None
    ) -> BrokerResult[QueueState]:
        """Run ``pause_queue`` without blocking the event loop."""
        order = _order(self, queue_name, paused=True, reason=reason)
        return await actions.switch_queue_async(self.get_broker(), order)

    def resume_queue(self, queue_name: str) -> BrokerResult[QueueState]:
        """Let workers claim a queue's tasks again; due tasks start immediately."""
        return actions.switch_queue(self.get_broker(), _order(self, queue_name, paused=False))

    async def resume_queue_async(self, queue_name: str) -> BrokerResult[QueueState]:
        """Run ``resume_queue`` without blocking the event loop."""
        order = _order(self, queue_name, paused=False)
        return await actions.switch_queue_async(self.get_broker(), order)

    @property
    def keys(self) -> Keys:
        """The keys of the queues, with ``list``, ``get``, ``set``, ``clear``, ``pause`` and ``resume``."""
        return keys.Keys(self.get_broker, self.get_valid_queue_names())

    def ping_database(self) -> BrokerResult[DatabasePing]:
        """Measure the round trip to the database."""
        return health.ping_database(self.get_broker())

    async def ping_database_async(self) -> BrokerResult[DatabasePing]:
        """Run ``ping_database`` without blocking the event loop."""
        return await health.ping_database_async(self.get_broker())

    def ping_workers(
        self,
        target_worker_id: str | None = None,
        timeout_seconds: float = PING_TIMEOUT_SECONDS,
        min_responses: int | None = None,
    ) -> BrokerResult[list[WorkerPong]]:
        """Ping all workers or one; return after the target's response, ``min_responses`` or the
        timeout.
        """
        return health.ping_workers(
            self.get_broker(), target_worker_id, timeout_seconds, min_responses
        )

    async def ping_workers_async(
        self,
        target_worker_id: str | None = None,
        timeout_seconds: float = PING_TIMEOUT_SECONDS,
        min_responses: int | None = None,
    ) -> BrokerResult[list[WorkerPong]]:
        """Run ``ping_workers`` without blocking the event loop."""
        return await health.ping_workers_async(
            self.get_broker(), target_worker_id, timeout_seconds, min_responses
        )

    def list_worker_states(self) -> BrokerResult[list[WorkerStateSnapshot]]:
        """Return the newest snapshot of every worker on record."""
        return health.list_worker_states(self.get_broker())

    async def list_worker_states_async(self) -> BrokerResult[list[WorkerStateSnapshot]]:
        """Run ``list_worker_states`` without blocking the event loop."""
        return await health.list_worker_states_async(self.get_broker())

    def get_worker_state(self, worker_id: str) -> BrokerResult[WorkerStateSnapshot | None]:
        """Return the newest snapshot of one worker, or None."""
        return self.get_worker_state_history(worker_id, limit=1).map(one_or_none)

    async def get_worker_state_async(
        self, worker_id: str
    ) -> BrokerResult[WorkerStateSnapshot | None]:
        """Run ``get_worker_state`` without blocking the event loop."""
        return (await self.get_worker_state_history_async(worker_id, limit=1)).map(one_or_none)

    def get_worker_state_history(
        self, worker_id: str, limit: int | None = None
    ) -> BrokerResult[list[WorkerStateSnapshot]]:
        """Return one worker's snapshots, newest first."""
        return health.get_worker_state_history(self.get_broker(), worker_id, limit)

    async def get_worker_state_history_async(
        self, worker_id: str, limit: int | None = None
    ) -> BrokerResult[list[WorkerStateSnapshot]]:
        """Run ``get_worker_state_history`` without blocking the event loop."""
        return await health.get_worker_state_history_async(self.get_broker(), worker_id, limit)


def _order(
    app: Operations, queue_name: str, *, paused: bool, reason: str | None = None
) -> QueueOrder:
    return actions.QueueOrder(queue_name, paused, app.get_valid_queue_names(), reason)
