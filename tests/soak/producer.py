"""The producer of a soak run: `python -m tests.soak.producer SEED` sends until SIGTERM.

A send whose outcome is in doubt is repeated until it is acknowledged; only then is it in the journal, with
the answer it must get.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from horsies import Result
from tests.soak import journal
from tests.soak.application import (
    answer_to,
    app,
    blink,
    blink_again,
    fail_first,
    misbehave,
    misbehave_async,
    nap,
    work_again,
    work_narrow,
    work_once,
    work_wide,
)
from tests.soak.flows import SHAPES, SIGNAL

SENDS_PER_SECOND = 5.0
TASKS = {work_once: 3, work_again: 4, work_wide: 3, work_narrow: 1, fail_first: 2}
stopping = threading.Event()


def acknowledged(first: Result[Any, Any], again: Callable[[Any], Result[Any, Any]]) -> Any:
    """The handle of a send, repeated while its outcome is in doubt."""
    sent = first
    while sent.is_err():
        error = sent.err_value
        if not error.retryable:
            raise RuntimeError(f"a send was refused: {error.code} {error.message}")
        time.sleep(0.2)
        sent = again(error)
    return sent.ok_value


def seconds_of(dice: random.Random) -> float:
    """Mostly short, sometimes long enough to live through a fault."""
    return dice.uniform(3.0, 7.0) if dice.random() < 0.06 else dice.uniform(0.02, 0.6)


def send_task(dice: random.Random, number: int) -> None:
    task = dice.choices(list(TASKS), list(TASKS.values()))[0]
    seconds = seconds_of(dice)
    if task in (work_narrow, work_wide):
        seconds = min(seconds, 0.8)
    handle = acknowledged(task.send(number, seconds), task.retry_send)
    journal.write("sent", kind=task.task_name, task_id=handle.task_id, answer=answer_to(number))


def send_delayed(dice: random.Random, number: int) -> None:
    delay = dice.randint(1, 5)
    handle = acknowledged(work_again.schedule(delay, number, 0.05), work_again.retry_schedule)
    answer = answer_to(number)
    journal.write("sent", kind="delayed", task_id=handle.task_id, answer=answer, delay=delay)


def send_idempotent(dice: random.Random, number: int) -> None:
    """Send the same request three times with one key."""
    key = f"key-{number}"
    keyed = work_again.with_options(idempotency_key=key)
    for _ in range(3):
        handle = acknowledged(keyed.send(number, 0.05), work_again.retry_send)
        answer = answer_to(number)
        journal.write("sent", kind="idempotent", task_id=handle.task_id, answer=answer, key=key)


def start_run(dice: random.Random, number: int) -> None:
    shape = dice.choice(SHAPES)
    order = shape(number)
    handle = acknowledged(order.spec.start(), order.spec.retry_start)
    journal.write("started", kind=shape.__name__, run_id=handle.workflow_id, answer=order.expected)
    if order.signal is not None:
        # One that is stored twice is kept for a second node, which this workflow does not have.
        acknowledged(
            handle.signal(SIGNAL, order.signal), lambda _: handle.signal(SIGNAL, order.signal)
        )


def send_burst(dice: random.Random, number: int) -> None:
    """Many very short tasks in one transaction. One that is in doubt is neither repeated nor expected."""
    task = dice.choice((blink, blink_again, nap))
    count, longest = (8, 0.4) if task is nap else (dice.randint(20, 60), 0.01)
    numbers = [1000 * number + place for place in range(count)]
    sent = task.send_many([task.bind(one, dice.uniform(0.0, longest)) for one in numbers])
    if sent.is_err() and not sent.err_value.retryable:
        raise RuntimeError(f"a send was refused: {sent.err_value}")
    for one, handle in zip(numbers, sent.unwrap() if sent.is_ok() else (), strict=False):
        answer = answer_to(one)
        journal.write("sent", kind=task.task_name, task_id=handle.task_id, answer=answer)


# Those after which innocent code of later tasks can still work in the same process.
HOSTILE = (
    *("make_blocking", "make_nonblocking", "ask_for_signals", "shrink_buffers"),
    *("set_socket_timeouts", "shut_reading", "shut_writing", "shut_sockets", "close_descriptors"),
    *("copy_descriptors", "replace_descriptors", "write_garbage", "write_zeros"),
    *("write_half_header", "write_half_frame", "write_foreign_frame"),
    *("read_a_part", "read_a_number", "read_two_numbers", "read_everything"),
    *("exit_at_once", "kill_itself", "become_another_program", "stop_itself"),
)
HOSTILE_TO_LOOPS = ("remove_readers", "remove_readers_later", "remove_writers", "stop_loop")


def send_hostile(dice: random.Random, number: int) -> None:
    """A task that harms its process, among short ones that share the windows of its child."""
    is_async = dice.random() < 0.25
    task = misbehave_async if is_async else misbehave
    how = dice.choice(HOSTILE_TO_LOOPS if is_async else HOSTILE)
    handle = acknowledged(task.send(number, how), task.retry_send)
    journal.write("sent", kind=task.task_name, task_id=handle.task_id, answer=answer_to(number))
    send_burst(dice, number)


ACTIONS = {
    send_task: 12,
    send_delayed: 2,
    send_idempotent: 1,
    start_run: 2,
    send_burst: 2,
    send_hostile: 2,
}


def main(seed: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    dice = random.Random(seed)
    number = 0
    while not stopping.wait(dice.expovariate(SENDS_PER_SECOND)):
        number += 1
        action = dice.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        action(dice, number)
    app.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
