"""The stores for large payload: a separate table, or a store outside the database."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

TABLE_STORE = "table"


class TableStore:
    """Keeps large payload in a separate table, ``horsies_payloads``.

    It needs no other server. The rows of tasks stay small, and only the child that runs a task reads its
    payload.

    Example:
        broker = PostgresConfig.from_env(store=TableStore(), store_above_bytes=50_000)
    """

    store_id = TABLE_STORE

    def __repr__(self) -> str:
        return "TableStore()"


@runtime_checkable
class PayloadStore(Protocol):
    """Keeps large payload outside the database. ``S3Store`` is built in; write your own for another store.

    Its methods are called in producers, workers and their children, from several threads. An exception
    means that the store does not respond: a send fails and can be repeated, and workers repeat their
    requests until the store responds. Logs and errors contain the message of the exception, so keep
    secrets out of the message.

    Example:
        class Files:
            store_id = "files"

            def put(self, name: str, data: bytes) -> None:
                (ROOT / name).write_bytes(data)

            def get(self, name: str) -> bytes | None:
                path = ROOT / name
                return path.read_bytes() if path.exists() else None

            def delete(self, names: Collection[str]) -> None:
                for name in names:
                    (ROOT / name).unlink(missing_ok=True)
    """

    @property
    def store_id(self) -> str:
        """The name of the store in references: 1 to 31 letters, digits, ``-``, ``_`` or ``.``."""

    def put(self, name: str, data: bytes) -> None:
        """Store an object under this name, a UUID that is never used again."""

    def get(self, name: str) -> bytes | None:
        """Return an object, or None if no object has this name."""

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; names without an object are ignored."""
