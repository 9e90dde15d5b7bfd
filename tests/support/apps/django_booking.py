"""Tasks that record their outcome in a transaction of Django."""

from __future__ import annotations

import os
from typing import Any

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from horsies import INJECTED, TaskTransaction, current_task
from tests.support.apps.booking import app, receipt
from tests.support.workers import DATABASE_VARIABLE

__all__ = ["app"]

_parts = conninfo_to_dict(os.environ[DATABASE_VARIABLE])
if not settings.configured:
    names = {
        "NAME": "dbname",
        "USER": "user",
        "PASSWORD": "password",
        "HOST": "host",
        "PORT": "port",
    }
    parts = {name: _parts.get(part) or "" for name, part in names.items()}
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **parts}}, USE_TZ=True
    )
    django.setup()

from django.db import connection, transaction  # noqa: E402 - Django must be configured


def insert(tx: TaskTransaction, number: int) -> None:
    with connection.cursor() as cursor:
        row: Any = (number, tx.attempt, current_task().id)
        cursor.execute("INSERT INTO bookings VALUES (%s, %s, %s)", row)


@app.task("book_with_django")
def book_with_django(number: int, how: str, tx: TaskTransaction = INJECTED) -> int:
    """Write and record in one atomic block, and end the block in the given way."""
    if how == "outside":
        return tx.record_in(connection, number)
    with transaction.atomic():
        insert(tx, number)
        receipt.with_options(transaction=connection).enqueue(number, 0.0)
        if how == "nested":
            with transaction.atomic():
                return tx.record_in(connection, number)
        recorded = tx.record_in(connection, number)
        if how == "raise":
            raise ValueError("inside the block")
        if how == "roll back":
            transaction.set_rollback(True)
    if how == "raise after":
        raise ValueError("after the block")
    return recorded


@app.task("book_beside_django")
def book_beside_django(number: int, tx: TaskTransaction = INJECTED) -> int:
    """Read through Django's connection, and write through the task's connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM bookings")
        (found,) = cursor.fetchone()
    tx.connection.execute(
        "INSERT INTO bookings VALUES (%s, %s, %s)", (number + found, tx.attempt, current_task().id)
    )
    return int(number + found)
