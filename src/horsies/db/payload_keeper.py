"""PayloadKeeper: stores large payloads, in a table of the database or in a store outside the database.

The order of writes is: first the object's row, in its own commit; then the object; then the task's row,
which refers to it. An interruption in between leaves an object without a task, which the sweep deletes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING
from uuid import UUID

from horsies.database_url import mask_url
from horsies.db.errors import StoreUnreachable
from horsies.db.statements.payloads import (
    find_released,
    forget_released,
    put_payload,
    read_payload,
)
from horsies.ids import new_id
from horsies.payload_store import TABLE_STORE, PayloadStore, TableStore

if TYPE_CHECKING:
    from horsies.db.database import Database

# The sweep deletes an object without a task only above this age, because the transaction of its send may be
# open for this long.
ORPHAN_SECONDS = 24 * 3600.0
# How many objects one statement checks or deletes.
SWEEP_BATCH = 500
FIRST = str(UUID(int=0))


class PayloadKeeper:
    """Stores and reads large payloads for the processes of an application."""

    __slots__ = ("_database", "_store", "above_bytes", "store_ids")

    def __init__(self, database: Database) -> None:
        self._database = database
        store = database.config.store
        self._store: PayloadStore | None = None if isinstance(store, TableStore) else store
        self.above_bytes = database.config.store_above_bytes
        # Objects in the application's previous stores stay readable.
        self.store_ids: Collection[str] = [
            TABLE_STORE,
            *([] if self._store is None else [self._store.store_id]),
        ]

    def put(self, owner_id: str, data: bytes) -> tuple[str, str]:
        """Store an object and return the store and the object's name."""
        name, store = new_id(), self._store
        store_id = TABLE_STORE if store is None else store.store_id
        body = data if store is None else None
        with self._database.payload_pool().connection() as connection:
            put_payload.fetch(connection, name, store_id, len(data), body, owner_id)
        if store is not None:
            try:
                store.put(name, data)
            except Exception as error:
                raise _unreachable(store_id, f"does not take {len(data):,} bytes", error) from error
        return store_id, name

    def get(self, store_id: str, name: str) -> bytes | None:
        """Return an object; None if no object has this name."""
        if store_id == TABLE_STORE:
            with self._database.payload_pool().connection() as connection:
                rows = read_payload.fetch(connection, name)
            return rows[0].body if rows else None
        if self._store is None:
            return None
        try:
            return self._store.get(name)
        except Exception as error:
            raise _unreachable(store_id, "does not answer", error) from error

    def delete_released(self) -> int:
        """Delete one batch of objects outside the database that no longer have an owner; return their
        number.
        """
        if self._store is None:
            return 0
        with self._database.payload_pool().connection() as connection:
            found = find_released.fetch(connection, self._store.store_id, SWEEP_BATCH)
            names = [one.id for one in found]
            if not names:
                return 0
            try:
                self._store.delete(names)
            except Exception as error:
                raise _unreachable(self._store.store_id, "does not delete", error) from error
            return len(forget_released.fetch(connection, names))


def _unreachable(store_id: str, problem: str, error: Exception) -> StoreUnreachable:
    text = mask_url(" ".join(str(error).split()))
    return StoreUnreachable(f"The store {store_id!r} {problem}: {type(error).__name__}: {text}")
