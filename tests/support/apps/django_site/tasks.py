"""Tasks as Django declares them."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import sys
from typing import Any

from django.dispatch import receiver
from django.tasks import TaskContext, task
from django.tasks.signals import task_finished, task_started


class Shortage(Exception):
    pass


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task(queue_name="mail")
async def greet(name: str) -> str:
    return f"hello {name}"


@task(takes_context=True)
def identify(context: TaskContext) -> tuple[str, int]:
    return context.task_result.id, context.attempt


@task
def run_short() -> None:
    raise Shortage("no oats: 3 missing")


@receiver([task_started, task_finished])
def print_signal(task_result: Any, **_: Any) -> None:
    print(f"signal {task_result.task.name} {task_result.status}", file=sys.stderr, flush=True)
