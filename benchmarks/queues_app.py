"""The application of the benchmark of queues: five queues, a plain task, and a very short task."""

from __future__ import annotations

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Horsies,
    PostgresConfig,
    QueueMode,
    RetryPolicy,
    SignalNode,
    TaskError,
    TaskResult,
)

QUEUES = ("first", "second", "third", "fourth", "last")

app = Horsies(
    AppConfig(
        broker=PostgresConfig.from_env(pool_size=1),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[
            CustomQueueConfig(name=name, priority=number)
            for number, name in enumerate(QUEUES, start=1)
        ],
    )
)
AGAIN = RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])


@app.task("plain", queue_name="first")
def plain() -> TaskResult[None, TaskError]:
    """Do nothing, in a separate child."""
    return TaskResult(ok=None)


@app.task("burst", queue_name="last", retry_policy=AGAIN)
def burst() -> TaskResult[None, TaskError]:
    """Do nothing; the task is retried after a crash."""
    return TaskResult(ok=None)


def start_waiting_run() -> None:
    """Start a run that waits for a signal in the first queue."""
    approval = SignalNode("approve", value_type=str)
    last = plain.node(waits_for=[approval])()
    app.workflow("approved", [approval, last], definition_key="approved").start().unwrap()
