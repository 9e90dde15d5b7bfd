"""Tasks that insert a row, in the same transaction as their outcome or in a separate one."""

from __future__ import annotations

import os
from typing import Any

import psycopg

from benchmarks.noop_app import app, noop
from horsies import INJECTED, TaskTransaction

__all__ = ["app", "apart", "declared", "inside", "noop"]

INSERT = "INSERT INTO benchmark_effects VALUES (1)"
# The connection of this child for `apart`, opened by its first task.
kept: list[psycopg.Connection[Any]] = []


@app.task("inside")
def inside(tx: TaskTransaction = INJECTED) -> None:
    """Insert a row, which the library commits with the outcome."""
    tx.connection.execute(INSERT)


@app.task("apart")
def apart() -> None:
    """Insert a row and commit it; the worker records the outcome."""
    if not kept:
        kept.append(psycopg.connect(os.environ["HORSIES_DATABASE_URL"]))
    kept[0].execute(INSERT)
    kept[0].commit()


@app.task("declared")
def declared(tx: TaskTransaction = INJECTED) -> None:
    """Declare a transaction and do not use it."""
