"""Enqueue tasks through Django's interface, and print the results as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.tasks import task_backends
from django.tasks.signals import task_enqueued

from horsies import TaskInfo
from tests.support.apps.django_site.background import plain
from tests.support.apps.django_site.worker import app, tasks
from tests.support.wait import wait_until

LATER = datetime(2100, 1, 1, tzinfo=UTC)
enqueued: list[str] = []


def note_enqueued(task_result: Any, **_: Any) -> None:
    enqueued.append(task_result.task.name)


def ended(result: Any) -> Any:
    """Refresh a result until its task has ended."""

    def is_finished() -> bool:
        result.refresh()
        return bool(result.is_finished)

    wait_until(is_finished, 60)
    return result


def info_of(result: Any) -> TaskInfo:
    info = app.get_task_info(result.id).unwrap()
    assert info is not None
    return info


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def values() -> dict[str, Any]:
    added = tasks.add.enqueue(1, b=2)
    at_first = added.status
    greeted = asyncio.run(tasks.greet.aenqueue("ada"))
    identified = ended(tasks.identify.enqueue())
    return {
        "first status": at_first,
        "add": ended(added).return_value,
        "call": [added.args, added.kwargs],
        "workers": len(added.worker_ids),
        "times": added.enqueued_at <= added.started_at <= added.finished_at,
        "greet": ended(greeted).return_value,
        "greet queue": info_of(greeted).queue_name,
        "identify": identified.return_value == [identified.id, 1],
    }


def failure() -> dict[str, Any]:
    failed = ended(tasks.run_short.enqueue())
    (error,) = failed.errors
    return {
        "status": failed.status,
        "class": error.exception_class is tasks.Shortage,
        "traceback": error.traceback.splitlines()[-1].rpartition(".")[2],
        "value": refusal(lambda: failed.return_value),
        "mismatch": refusal(lambda: tasks.add.get_result(failed.id)).partition(":")[0],
    }


def options() -> dict[str, Any]:
    later = tasks.add.using(run_after=LATER)
    sent = [later.using(priority=priority).enqueue(1) for priority in (100, 0, -100)]
    infos = [info_of(one) for one in sent]
    cancelled = sent[0]
    app.cancel_task(cancelled.id).unwrap()
    cancelled.refresh()
    return {
        "priorities": [info.priority for info in infos],
        "due": all(info.enqueued_at == LATER for info in infos),
        "status": tasks.add.get_result(sent[1].id).status,
        "cancelled": [cancelled.status, cancelled.errors[0].exception_class.__name__],
    }


def transactions() -> dict[str, Any]:
    with transaction.atomic():
        dropped = tasks.add.enqueue(1)
        independent = tasks.add.using(backend="plain").enqueue(3)
        transaction.set_rollback(True)
    with transaction.atomic():
        kept = tasks.add.enqueue(2)
        before = refusal(lambda: tasks.add.get_result(kept.id)).partition(":")[0]
    return {
        "rolled back": refusal(lambda: tasks.add.get_result(dropped.id)).partition(":")[0],
        "without the option": ended(independent).return_value,
        "before commit": before,
        "after commit": ended(kept).return_value,
    }


def mistakes() -> dict[str, str]:
    return {
        "queue": refusal(lambda: tasks.add.using(queue_name="unknown")),
        "id": refusal(lambda: tasks.add.get_result("nothing")),
        "app": refusal(lambda: task_backends["wrong"]),
        "option": refusal(lambda: task_backends["misspelt"]),
    }


if __name__ == "__main__":
    task_enqueued.connect(note_enqueued)
    sections = (values, failure, options, transactions, mistakes)
    found: dict[str, Any] = {section.__name__: section() for section in sections}
    print(json.dumps(found | {"enqueued": sorted(set(enqueued))}))
    app.close()
    plain.close()
