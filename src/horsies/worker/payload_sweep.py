"""Deletes large payloads that no row needs any more, a page at a time.

Any worker whose application has a store may do this, even two workers at the same time.
"""

from __future__ import annotations

import logging
import threading

import psycopg

from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.payload_keeper import FIRST, ORPHAN_SECONDS, SWEEP_BATCH, PayloadKeeper
from horsies.db.pipeline import Pipeline
from horsies.db.statements.payloads import sweep_payloads
from horsies.payload_store import TableStore
from horsies.tasks.blocked import Failures
from horsies.worker.reaper import RETENTION, delete_rows

logger = logging.getLogger("horsies.reaper")


class PayloadSweep:
    """Remembers where the next page of objects starts, and the thread that deletes objects outside the
    database.
    """

    def __init__(self, config: PostgresConfig) -> None:
        self._config = config
        self._after = FIRST
        self._deleting: threading.Thread | None = None

    def sweep(self, pipeline: Pipeline, failures: Failures) -> bool:
        """Check the objects of one page; return True if there may be further objects."""
        if self._config.store is None or not pipeline.run([RETENTION])[0][0].leads:
            return False
        page = sweep_payloads(self._after, ORPHAN_SECONDS, SWEEP_BATCH)
        rows = delete_rows(pipeline, page, failures)
        self._after = (rows[0].id if rows else None) or FIRST
        if not isinstance(self._config.store, TableStore):
            self._delete_outside()
        return self._after != FIRST

    def _delete_outside(self) -> None:
        """A thread deletes the objects, because a store that does not respond must not delay the worker's
        heartbeat.
        """
        if self._deleting is None or not self._deleting.is_alive():
            self._deleting = threading.Thread(
                target=delete_released, args=(self._config,), name="horsies-payloads", daemon=True
            )
            self._deleting.start()


def delete_released(config: PostgresConfig) -> None:
    """Delete all objects outside the database that no longer have an owner."""
    database = Database(config, "worker", migrates=False)
    try:
        while PayloadKeeper(database).delete_released():
            pass
    except psycopg.Error as error:
        logger.warning("large payloads are deleted later: %s", describe(error))
    finally:
        database.close()
