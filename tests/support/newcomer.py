"""Twenty questions of a newcomer, with the place of each answer in the documentation. `python -m
tests.support.newcomer` prints the questions without the answers, for a reader who has never used Horsies
and has only the built site.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A question, the page and anchor that answer it, and words in a correct answer."""

    text: str
    page: str
    anchor: str
    words: tuple[str, ...]


QUESTIONS = (
    Question(
        "What do you need besides Python to run your first task?",
        "install.md",
        "what-you-need",
        ("PostgreSQL",),
    ),
    Question(
        "Which command shows you a running system without writing any code?",
        "install.md",
        "watch-it-first",
        ("make demo",),
    ),
    Question(
        "How do you make sure that an order and its mail task are stored together, or not at all?",
        "transactions.md",
        "sqlalchemy",
        ("transaction=",),
    ),
    Question(
        "A worker's process dies in the middle of a task. What happens to the task?",
        "how-it-works.md",
        "the-effect-of-a-crash",
        ("WORKER_CRASHED",),
    ),
    Question(
        "How do you run a task again after a ConnectionError, with growing waits?",
        "retries.md",
        "waiting-times",
        ("RetryPolicy.exponential",),
    ),
    Question(
        "The server tells you to come back in 90 seconds. How does your task obey?",
        "retries.md",
        "retrylater",
        ("RetryLater",),
    ),
    Question(
        "How do you stop a task that takes longer than 30 seconds?",
        "time-limits.md",
        "set-a-timeout",
        ("timeout_ms",),
    ),
    Question(
        "A user clicks twice. How do you charge the card once?",
        "idempotency.md",
        "one-task-per-key",
        ("idempotency_key",),
    ),
    Question(
        "How do you run a task at 3 every night, Berlin time?",
        "schedule-patterns.md",
        "patterns",
        ("DailySchedule",),
    ),
    Question(
        "The scheduler was down for two hours. Which slots are sent when it is back?",
        "scheduling.md",
        "missed-slots",
        ("catch_up_missed", "latest missed slot"),
    ),
    Question(
        "How do you wait for a task's value, and what do you get if it failed?",
        "results.md",
        "two-forms",
        ("result(", "TaskFailed"),
    ),
    Question(
        "How do you run one task per element of a list and collect the results?",
        "workflows.md",
        "map-sleep-signal",
        ("MapNode",),
    ),
    Question(
        "How does a workflow wait until a person approves?",
        "workflows.md",
        "map-sleep-signal",
        ("SignalNode",),
    ),
    Question(
        "Your task waits and nothing happens. Which command tells you why?",
        "troubleshooting.md",
        "my-task-does-not-run",
        ("horsies explain",),
    ),
    Question(
        "How do you allow at most ten tasks of a queue at a time, over all workers?",
        "queues.md",
        "concurrency-limits",
        ("max_concurrency",),
    ),
    Question(
        "You deploy. How do you give running tasks 60 seconds to finish, and let the others run again?",
        "stopping.md",
        "stopping",
        ("--shutdown-grace",),
    ),
    Question(
        "How do you test code that sends tasks, without a database?",
        "testing.md",
        "capture-sends",
        ("capture_sends",),
    ),
    Question(
        "Does a task run exactly once?",
        "faq.md",
        "does-a-task-run-exactly-once",
        ("once",),
    ),
    Question(
        "You have ten thousand coroutines that mostly wait. Which flag do you need?",
        "async-tasks.md",
        "async-children",
        ("--async-children",),
    ),
    Question(
        "A log shows WORKER_RESOLUTION_ERROR. What does it mean, and what do you do first?",
        "codes.md",
        "worker_resolution_error",
        ("No worker of the queue", "Remedy"),
    ),
)


def main() -> None:
    """Print the questions, numbered."""
    for number, question in enumerate(QUESTIONS, 1):
        print(f"{number}. {question.text}")


if __name__ == "__main__":
    main()
