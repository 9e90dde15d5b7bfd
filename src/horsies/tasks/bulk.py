"""Sends many tasks: a stream of calls becomes chunks of rows, which are all stored in one transaction.

A chunk is encoded while the server inserts the previous chunk. Memory holds the rows of two chunks, and
16 bytes for each task sent. Hooks and spans need the number of calls, so if there are hooks or spans, all
calls are encoded first.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload
from uuid import UUID

from horsies.codec.calls import EncodedCall
from horsies.db.statement import Script, Statement, Step
from horsies.db.statements.tasks import (
    InsertTasks,
    find_sent_tasks,
    insert_new_tasks,
    insert_tasks,
)
from horsies.ids import new_id
from horsies.modules import Deferred
from horsies.result import Err, Ok
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerResult,
    PayloadMismatchError,
    PostgresBroker,
    resend_delays,
)
from horsies.tasks.handle import TaskHandle
from horsies.tasks.keys import lane_of
from horsies.tasks.options import SendOptions, option_problem
from horsies.tasks.request import (
    SharedValues,
    TaskSendError,
    TaskSendResult,
    call_key,
    encode,
    refused,
    run_hooks,
    shared_values,
    suppressed,
)
from horsies.tasks.send import Sender, TaskCall, not_stored, reported
from horsies.tracing import Sending

if TYPE_CHECKING:
    import tempfile
else:
    tempfile = Deferred("tempfile")

T = TypeVar("T")
Chunk = list[EncodedCall]
Handles = Sequence[TaskHandle[T]]

# The server takes 10 ms for a statement with a thousand rows, including 0.1 ms for the statement itself.
CHUNK_CALLS = 1_000
CHUNK_CHARACTERS = 1_000_000
# A chunk of one row would send a different notification, which contains the row's id. To avoid this, the last
# chunk takes over two calls from the previous chunk.
_CARRIED = 2
# The size above which rows that are kept for a resend are written to a temporary file.
KEPT_BYTES_IN_MEMORY = 8_000_000
_STORING = BrokerErrorCode.ENQUEUE_FAILED
# The columns that differ between the rows of a chunk.
_COLUMNS = ("ids", "args", "kwargs", "enqueue_shas", "lane_keys", "lanes")


def send_many(sender: Sender, calls: Iterable[TaskCall[T]]) -> TaskSendResult[Handles[T]]:
    """Check all calls and store all of them, or none after an error."""
    match _prepare(sender, calls):
        case Err() as unsent:
            return reported(sender, unsent)
        case Ok(bulk):
            started = time.perf_counter()
            with closing(bulk):
                return reported(sender, bulk.end(bulk.store()), None, started)


async def send_many_async(
    sender: Sender, calls: Iterable[TaskCall[T]]
) -> TaskSendResult[Handles[T]]:
    """Like ``send_many``, but block the event loop only during the encoding of a chunk."""
    match _prepare(sender, calls):
        case Err() as unsent:
            return reported(sender, unsent)
        case Ok(bulk):
            started = time.perf_counter()
            with closing(bulk):
                return reported(sender, bulk.end(await bulk.store_async()), None, started)


class TaskHandles(Sequence[TaskHandle[T]]):
    """The handles for a stream of calls. The sequence keeps 16 bytes per task and creates each handle on
    access.
    """

    __slots__ = ("_ids", "_make")

    def __init__(self, make: Callable[[str], TaskHandle[T]], ids: bytes | bytearray = b"") -> None:
        self._make = make
        self._ids = bytearray(ids)

    def extend(self, ids: Iterable[str]) -> None:
        """Append handles for these tasks."""
        self._ids += bytes.fromhex("".join(ids).replace("-", ""))

    def __len__(self) -> int:
        return len(self._ids) // 16

    @overload
    def __getitem__(self, index: int) -> TaskHandle[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[TaskHandle[T]]: ...
    def __getitem__(self, index: int | slice) -> TaskHandle[T] | list[TaskHandle[T]]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        start = 16 * range(len(self))[index]
        return self._make(str(UUID(bytes=bytes(self._ids[start : start + 16]))))

    def __add__(self, other: object) -> list[TaskHandle[T]]:
        return [*self, *other] if isinstance(other, TaskHandles | list) else NotImplemented

    def __radd__(self, other: object) -> list[TaskHandle[T]]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"<{len(self):,} task handles>"


class KeptRows:
    """The texts of the rows that an attempt has sent, kept for a resend; large amounts are in a temporary
    file.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(KEPT_BYTES_IN_MEMORY)

    def add(self, *texts: str) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(texts).encode() + b"\n")

    def __iter__(self) -> Iterator[list[str]]:
        self._file.seek(0)
        return (json.loads(line) for line in self._file)

    def close(self) -> None:
        self._file.close()


class _RefusedCall(Exception):
    """A call in the stream that cannot be sent."""

    def __init__(self, error: TaskSendError) -> None:
        super().__init__(error.message)
        self.error = error


def _encoded(sender: Sender, calls: Iterable[TaskCall[Any]]) -> Iterator[Chunk]:
    """Check and encode the calls, chunk by chunk."""
    definition, config = sender.definition, sender.producer.config
    chunk: Chunk = []
    size = 0
    for position, call in enumerate(calls):
        if getattr(call, "task_name", None) != definition.name:
            problem = refused(definition, "send_many takes calls made by this task's bind(...)")
            raise _refused_at(position, problem)
        encoded = encode(config.payload, definition, call.args, call.kwargs)
        if isinstance(encoded, Err):
            raise _refused_at(position, encoded.value)
        key, fault = call_key(config, definition, sender.options, call.args, call.kwargs)
        if fault is not None:
            raise _refused_at(position, refused(definition, fault))
        chunk.append(encoded.value if key is None else encoded.value._replace(key=key))
        size += len(encoded.value.args_json) + len(encoded.value.kwargs_json)
        is_large = size > CHUNK_CHARACTERS and len(chunk) > _CARRIED + 1
        if len(chunk) == CHUNK_CALLS + _CARRIED or is_large:
            yield chunk[:-_CARRIED]
            chunk, size = chunk[-_CARRIED:], 0
    if chunk:
        yield chunk


def _refused_at(position: int, error: TaskSendError) -> _RefusedCall:
    return _RefusedCall(TaskSendError(error.code, f"Call {position} of send_many: {error.message}"))


def _prepare(sender: Sender, calls: Iterable[TaskCall[T]]) -> TaskSendResult[_Bulk[T]]:
    """Check the options and the first calls, or all calls if hooks or tracing are in use."""
    producer, options = sender.producer, sender.options
    if producer.are_sends_suppressed():
        return Err(suppressed())
    if problem := _problem(sender, calls):
        return Err(refused(sender.definition, problem))
    chunks = _encoded(sender, calls)
    needs_all = bool(producer.hooks) or producer.config.tracing is not None
    try:
        # Reading up to two chunks shows whether one statement is enough.
        first = list(chunks if needs_all else islice(chunks, 2))
    except _RefusedCall as refusal:
        return Err(refusal.error)
    if producer.hooks:
        count = sum(map(len, first))
        hooked = run_hooks(producer.hooks, producer.config, sender.definition, options, count)
        if isinstance(hooked, Err):
            return hooked
        options = hooked.value
    shared = shared_values(producer.config, sender.definition, options, None)
    row, sending = _traced(sender, _shared_row(sender.definition.name, options, shared), first)
    match producer.broker():
        case Err(error):
            if sending is not None:
                sending.end(error.code.value)
            return Err(not_stored(error, None, options.transaction))
        case Ok(broker):
            bulk = _Bulk[T](
                sender,
                broker,
                shared,
                row,
                chain(first, chunks),
                has_list=isinstance(calls, Sequence),
                is_single=len(first) < 2,
                sending=sending,
            )
            return Ok(bulk)


def _problem(sender: Sender, calls: object) -> str | None:
    if problem := option_problem(sender.producer.config, sender.options):
        return problem
    if sender.options.idempotency_key is not None:
        return "an idempotency_key names one request; send_many takes none"
    if not isinstance(calls, Iterable):
        return f"send_many takes a list of calls made by bind(...), not {type(calls).__name__}"
    return None


def _shared_row(task_name: str, options: SendOptions, shared: SharedValues) -> InsertTasks:
    """Return the columns that all rows share; columns that differ are empty."""
    return InsertTasks(
        task_name=task_name,
        queue_name=shared.queue_name,
        priority=shared.priority,
        sent_at=datetime.now(UTC),
        enqueue_at=options.at,
        delay_seconds=options.delay.total_seconds() if options.delay else 0.0,
        good_until=shared.good_until,
        max_retries=shared.max_retries,
        task_options=shared.task_options,
        timeout_ms=shared.timeout_ms,
        retention_seconds=shared.retention_seconds,
        ids="",
        args="",
        kwargs="",
        enqueue_shas="",
    )


def _traced(
    sender: Sender, row: InsertTasks, chunks: Sequence[Chunk]
) -> tuple[InsertTasks, Sending | None]:
    """Start the send's span and add its carrier to the rows."""
    tracing = sender.producer.config.tracing
    if tracing is None or not chunks:
        return row, None
    size = sum(len(call.args_json) + len(call.kwargs_json) for one in chunks for call in one)
    count = sum(map(len, chunks))
    return sender.traced(tracing, row, size, {"messaging.batch.message_count": count})


class _Bulk(Generic[T]):
    """One call of ``send_many``: its rows, and the handles of the rows created so far."""

    def __init__(
        self,
        sender: Sender,
        broker: PostgresBroker,
        shared: SharedValues,
        row: InsertTasks,
        chunks: Iterator[Chunk],
        *,
        has_list: bool,
        is_single: bool,
        sending: Sending | None,
    ) -> None:
        config, options = sender.producer.config, sender.options
        self._broker = broker
        self._shared = shared
        self._row = row
        self._chunks = chunks
        self._is_single = is_single
        self._sending = sending
        self._transaction = options.transaction
        self._delays = resend_delays(config.resend_on_transient_err, options.transaction)
        self._kept = KeptRows() if self._delays else None
        # The exception that ended the stream: a call was rejected, or the caller's iterable raised.
        self._fault: Exception | None = None
        make: Callable[[str], TaskHandle[T]] = functools.partial(
            TaskHandle, broker=broker, results=sender.definition.results
        )
        self._make = make
        self._handles: list[TaskHandle[T]] | TaskHandles[T] = [] if has_list else TaskHandles(make)

    def store(self) -> BrokerResult[None]:
        """Insert all rows; repeat the insert after a transient failure if the configuration allows it."""
        stored = self._store_first()
        for delay_seconds in self._delays:
            if not self._is_repeatable(stored):
                break
            time.sleep(delay_seconds)
            stored = self._broker.perform(_STORING, self._script(insert_tasks), atomic=True)
        return stored

    async def store_async(self) -> BrokerResult[None]:
        stored = await self._store_first_async()
        for delay_seconds in self._delays:
            if not self._is_repeatable(stored):
                break
            await asyncio.sleep(delay_seconds)
            script = self._script(insert_tasks)
            stored = await self._broker.perform_async(_STORING, script, atomic=True)
        return stored

    def _store_first(self) -> BrokerResult[None]:
        broker, script = self._broker, self._script(insert_new_tasks)
        if self._is_single:
            return broker.store(lambda: script, self._transaction)
        if self._transaction is None and broker.is_direct:
            return broker.store_stream(self._steps())
        return broker.perform(_STORING, script, self._transaction, atomic=True)

    async def _store_first_async(self) -> BrokerResult[None]:
        broker, script = self._broker, self._script(insert_new_tasks)
        if self._is_single:
            return await broker.store_async(lambda: script, self._transaction)
        if self._transaction is None and broker.is_direct:
            return await broker.store_stream_async(self._steps())
        return await broker.perform_async(_STORING, script, self._transaction, atomic=True)

    def _is_repeatable(self, stored: BrokerResult[None]) -> bool:
        return isinstance(stored, Err) and stored.err_value.retryable and self._fault is None

    def end(self, stored: BrokerResult[None]) -> TaskSendResult[Handles[T]]:
        """Return the handles or the error, and end the span; an error from the iterable is raised."""
        sent: TaskSendResult[Handles[T]] = Ok(self._handles)
        if isinstance(stored, Err):
            sent = Err(not_stored(stored.value, None, self._transaction))
        if isinstance(self._fault, _RefusedCall):
            sent = Err(self._fault.error)
        if self._sending is not None:
            self._sending.end(sent.err_value.code.value if isinstance(sent, Err) else None)
        if self._fault is not None and not isinstance(self._fault, _RefusedCall):
            raise self._fault
        return sent

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def _script(self, statement: Statement[Any, Any]) -> Script[None]:
        for rows in self._rows():
            answer = yield statement, rows
            if not answer or answer[0].inserted == rows.ids.count("\n") + 1:
                continue
            ids = rows.ids.split("\n")
            present = yield find_sent_tasks(ids)
            shas = {row.id: row.enqueue_sha for row in present}
            for task_id, sha in zip(ids, rows.enqueue_shas.split("\n"), strict=True):
                if shas.get(task_id, sha) != sha:
                    raise PayloadMismatchError(
                        f"Task {task_id} already exists with a different request."
                    )

    def _steps(self) -> Iterator[Step]:
        return ((insert_new_tasks, rows) for rows in self._rows())

    def _rows(self) -> Iterator[InsertTasks]:
        """Yield the rows of earlier attempts, followed by the rows of the rest of the stream."""
        for kept in self._kept or ():
            columns: dict[str, Any] = dict(zip(_COLUMNS, kept, strict=True))
            yield self._row._replace(**columns)
        while True:
            try:
                chunk = next(self._chunks, None)
            except Exception as fault:
                self._fault = fault
                raise
            if chunk is None:
                return
            rows = self._made(chunk)
            if self._kept is not None:
                self._kept.add(*(getattr(rows, column) for column in _COLUMNS))
            yield rows

    def _made(self, chunk: Chunk) -> InsertTasks:
        ids = [new_id() for _ in chunk]
        if isinstance(self._handles, TaskHandles):
            self._handles.extend(ids)
        else:
            self._handles += map(self._make, ids)
        return self._row._replace(
            ids="\n".join(ids),
            args="\n".join([call.args_json for call in chunk]),
            kwargs="\n".join([call.kwargs_json for call in chunk]),
            enqueue_shas="\n".join(self._shared.fingerprints(self._row.sent_at, chunk)),
            **self._keys(chunk),
        )

    def _keys(self, chunk: Chunk) -> dict[str, Any]:
        """Return the columns for keys; either all calls of a stream have a key, or none has."""
        if chunk[0].key is None:
            return {}
        queue_name = self._row.queue_name
        lanes = [lane_of(queue_name, call.key) for call in chunk if call.key is not None]
        return {
            "lane_keys": "\n".join([json.dumps(lane.key) for lane in lanes]),
            "lanes": "\n".join([str(lane.number) for lane in lanes]),
        }
