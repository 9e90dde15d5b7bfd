"""Catalogue of the statements on large payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horsies.db.statement import StatementFile

PAYLOADS = StatementFile("payloads.sql")


class Body(NamedTuple):
    body: bytes


class ObjectId(NamedTuple):
    id: str


class LastId(NamedTuple):
    """The id of the last object on a full page, or None."""

    id: str | None


@PAYLOADS.statement
def put_payload(id: str, store: str, bytes: int, body: bytes | None, owner_id: str) -> None: ...
@PAYLOADS.statement
def read_payload(id: str) -> Body: ...
@PAYLOADS.statement
def sweep_payloads(after: str, seconds: float, limit: int) -> LastId: ...
@PAYLOADS.statement
def find_released(store: str, limit: int) -> ObjectId: ...
@PAYLOADS.statement
def forget_released(ids: Sequence[str]) -> ObjectId: ...


PAYLOADS.complete()
