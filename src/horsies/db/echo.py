"""The echo of statements: their names and durations in the log, for ``PostgresConfig.echo``.

Beside the line producer -> SQL -> turn -> child -> report -> result. Parameters are never written:
they hold the arguments and results of tasks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from horsies.db.query import Answer, Script, Step

logger = logging.getLogger("horsies.sql")


def echoed(script: Script[Answer]) -> Script[Answer]:
    """Return the same script; each of its statements is logged when its answer is here.

    One that failed is logged when the script is closed.
    """
    rows = None
    while True:
        try:
            step = next(script) if rows is None else script.send(rows)
        except StopIteration as finished:
            answer: Answer = finished.value
            return answer
        started = time.perf_counter()
        try:
            rows = yield step
        except GeneratorExit:
            echo([step], started, "failed after")
            raise
        echo([step], started)


def echo(steps: Iterable[Step], started: float, verb: str = "took") -> None:
    """Log what was sent together, and how long it has taken since ``started``."""
    names = ", ".join(statement.name for statement, _ in steps)
    logger.info("%s %s %.1f ms", names, verb, (time.perf_counter() - started) * 1000)
