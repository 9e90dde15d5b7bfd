"""Frames between the worker's parent process and its children: assignments to a child, reports back.

A frame consists of a four-byte length, a byte for its kind, fixed numbers (including the lengths of the texts
in characters), and the texts in UTF-8, one after another. Decoding never builds objects from names. For any
bytes from a child, the parent either decodes one of the values below or raises ``ProtocolError``, which costs
only that child. Each of a child's frames begins with a mark, random bytes that only this child has, so that
bytes written to the socket by task code can be skipped.

Assignments are numbered from 1 in each child, at the beginning and at the end of their frame. Task code
can read data that the worker has sent to its child; the numbers show the child which frames are missing
or incomplete.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import from_json, to_json

from horsies.captured_log import KEEP_NOTHING, CapturedLog, LogLimits
from horsies.current_task import NOTE_CHARACTERS_MAX
from horsies.errors import checked_delay
from horsies.failure_fingerprint import NO_ORIGIN, TEXT_MAX, Origin
from horsies.ids import new_id
from horsies.parking import ParkRequest

if TYPE_CHECKING:
    from horsies.db.statements.turn import ClaimedTask
    from horsies.tasks.outcome import Outcome

MAX_FRAME_BYTES = 1 << 30
# Makes a named tuple of a tuple with all of its fields, without the Python call of its class.
_new = tuple.__new__
# The highest possible number of an assignment.
LAST_NUMBER = (1 << 63) - 1


class FrameKind(IntEnum):
    """The kinds of frames. The first three kinds, BATCH, SHARE and STOP_TASK are sent to a child; all other
    kinds are sent by it.
    """

    BOOT = 1
    ASSIGN = 2
    STOP = 3
    HELLO = 4
    READY = 5
    REPORT = 6
    HOOK_FAILED = 8
    BOOT_FAILED = 9
    TASK_STOPPED = 22
    # The following kinds are for children that run several coroutines at a time.
    SHARE = 20
    STOP_TASK = 21
    PROGRESS = 23
    LOOP_BLOCKED = 24
    TASK_UNSTARTED = 25
    # The assignments with the numbers from the first to the second in the frame run in one call.
    BATCH = 26


class ProgressReport(NamedTuple):
    """The progress of an attempt; `total` and `note` are optional."""

    task_id: str
    generation: int
    done: float
    total: float | None
    note: str | None


class ProtocolError(Exception):
    """The bytes on a child's socket are not a valid frame for their receiver."""


class NodeInput(NamedTuple):
    """Another node's stored result, and the fields needed to read it."""

    task_index: int
    kind: str
    task_name: str
    result: str
    sub_definition_key: str | None = None
    sub_workflow_summary: str | None = None


class NodePart(NamedTuple):
    """The workflow data of an assignment: its run, its node, and the results that it takes.

    `inputs_json` maps parameters and context members to nodes. Only an expansion needs the root of the
    run and its depth.
    """

    workflow_id: str
    task_index: int
    inputs_json: str | None = None
    sources: tuple[NodeInput, ...] = ()
    root_workflow_id: str | None = None
    depth: int = 0


class Assignment(NamedTuple):
    """One attempt of a task, as it is given to a child; `node` is set if the task belongs to a workflow."""

    task_id: str
    generation: int
    task_name: str
    attempt: int
    args_json: str
    kwargs_json: str
    timeout_ms: int | None
    node: NodePart | None = None
    # The fields that only ``CurrentTask`` reads, together in one text.
    stored: str = ""

    def payload(self) -> tuple[str, ...]:
        """Return the texts that may be encrypted or in a store: the arguments, and the results of nodes."""
        if self.node is None:
            return self.args_json, self.kwargs_json
        return self.args_json, self.kwargs_json, *[one.result for one in self.node.sources]


def assignment_of(task: ClaimedTask, node: NodePart | None = None) -> Assignment:
    """Return a task's assignment; `node` is its workflow data, with its inputs."""
    fields = (
        task.id,
        task.generation,
        task.task_name,
        task.retry_count + 1,
        task.args or "[]",
        task.kwargs or "{}",
        task.timeout_ms,
        node,
        task.stored(),
    )
    return _new(Assignment, fields)  # every task needs an assignment; see _new


class TransactionEnd(IntEnum):
    """The end of a task's transaction (``tx``), in which the child records the outcome."""

    # The task had no transaction, or it was rolled back: the worker records the outcome.
    NONE = 0
    RECORDED = 1
    # The task belongs to another worker; the transaction was rolled back.
    LOST = 2
    # The connection was lost during COMMIT: the worker must read the database to find out the outcome.
    DOUBT = 3


class ChildReport(NamedTuple):
    """The outcome of an assignment: the encoded result, and the code and message of an error.

    ``was_called`` is False if the child could not call the function because the stored call does not fit it:
    another release of the application may be able to. The class names of an exception and the seconds of a
    RetryLater decide about a retry.
    """

    task_id: str
    generation: int
    ok: bool
    result_json: str
    error_code: str | None
    error_message: str | None
    was_called: bool = True
    exception_names: tuple[str, ...] = ()
    retry_after: float | None = None
    # The attempt's span as a W3C traceparent, if the application uses tracing.
    traceparent: str | None = None
    transaction: TransactionEnd = TransactionEnd.NONE
    # The wait of a durable run that has left its child without an outcome.
    park: ParkRequest | None = None
    # Where an exception was raised, for the fingerprint of the failure.
    origin: Origin = NO_ORIGIN
    # The lines that the attempt has logged, if the application keeps them.
    log: CapturedLog | None = None


# The fields after the result in the report of a success.
_OF_SUCCESS = ChildReport("", 0, True, "", None, None)[4:]


def with_transaction(outcome: Outcome, report: ChildReport) -> Outcome:
    """Return the outcome with the facts about the task's transaction from the report."""
    end = report.transaction
    return outcome._replace(
        is_recorded=end is TransactionEnd.RECORDED, is_in_doubt=end is TransactionEnd.DOUBT
    )


@dataclass(frozen=True, slots=True)
class ChildBoot:
    """The settings with which a child or the fork server starts, passed as JSON to a fresh interpreter.

    ``program`` names the function that loads the application and returns the child's ``Program``. The fork
    server forks the first ``forks_singly`` children one by one, and later children ``forks_ahead`` at a time.
    The guard finds the processes to kill by ``guard_mark``; 0 means that there is no guard. With
    ``shares_terminal`` the child stays in the worker's session and keeps its standard input. A child needs
    ``worker_id``, the owner of the tasks, to record an outcome in a task's transaction.
    """

    app_locator: str
    modules: tuple[str, ...] = ()
    sys_path_roots: tuple[str, ...] = ()
    log_level: str = "INFO"
    log_format: str = "text"
    worker_name: str | None = None
    samples_memory: bool = False
    forks_singly: int = 0
    forks_ahead: int = 1
    hook_budget_seconds: float = 10.0
    program: str = "horsies.worker.child.execute:load_program"
    guard_mark: int = 0
    shares_terminal: bool = False
    worker_id: str = field(default_factory=new_id)
    log_limits: LogLimits = KEEP_NOTHING
    captured_level: str = "INFO"


_HEADER = Struct("!IB")
_LENGTH = Struct("!I").unpack_from
_ASSIGN = Struct("!IBQ?qiqIIIIII")
_ASSIGNMENT_NUMBER = Struct("!Q?")
_NUMBER_BYTES = 8
_NUMBER_PLACE = slice(_HEADER.size, _HEADER.size + _NUMBER_BYTES)
_REPORT = Struct("!IBqBqqIIII")
_REPORT_BYTES = _REPORT.size
_NUMBERS = Struct("!IBqq")
_NO_TEXT = 0xFFFFFFFF
# The flags of nearly every report: the function was called and succeeded, and the report has no optional
# fields.
_SUCCESS = 1
# The fields after the result in such a report.
_NOTHING_ELSE = ChildReport("", 0, True, "", None, None)[4:]
_NO_TIMEOUT = -1
# The maximum run time, ten years. It is limited because an attempt's start is computed from its run time.
_RUN_MICROSECONDS_MAX = 10 * 366 * 86_400 * 10**6

# The maximum length of each kind of frame; a frame that declares a greater length is rejected.
_LONGEST: dict[int, int] = dict.fromkeys(FrameKind, 1 << 26)
_LONGEST |= dict.fromkeys((FrameKind.BOOT, FrameKind.ASSIGN, FrameKind.REPORT), MAX_FRAME_BYTES)
for _kind in (FrameKind.STOP, FrameKind.HELLO, FrameKind.READY, FrameKind.SHARE, FrameKind.BATCH):
    _LONGEST[_kind] = _NUMBERS.size - 4

_KIND_ASSIGN = int(FrameKind.ASSIGN)
_KIND_REPORT = int(FrameKind.REPORT)


def encode_assignment(assignment: Assignment, number: int = 1, needs_permit: bool = False) -> bytes:
    """Return the frame for `assignment`, which is the child's assignment with this `number`."""
    task_id, generation, name, attempt, args, kwargs, timeout_ms, node, stored = assignment
    head, texts = ("", "") if node is None else _node_texts(node)
    body = f"{task_id}{name}{args}{kwargs}{stored}{head}{texts}".encode()
    header = _ASSIGN.pack(
        _ASSIGN.size - 4 + len(body) + _NUMBER_BYTES,
        _KIND_ASSIGN,
        number,
        needs_permit,
        generation,
        attempt,
        _NO_TIMEOUT if timeout_ms is None else timeout_ms,
        len(task_id),
        len(name),
        len(args),
        len(kwargs),
        len(stored),
        len(head),
    )
    return header + body + header[_NUMBER_PLACE]


def assignment_number(frame: bytes) -> tuple[int, bool]:
    """Return the number of the assignment in `frame`, and whether it needs a permit.

    Raises ``ProtocolError`` if the beginning and the end belong to different frames.
    """
    try:
        number, needs_permit = _ASSIGNMENT_NUMBER.unpack_from(frame, _HEADER.size)
    except struct.error as error:
        raise ProtocolError(f"malformed assignment: {error}") from error
    if frame[_NUMBER_PLACE] != frame[-_NUMBER_BYTES:]:
        raise ProtocolError(f"assignment {number} does not end with its number")
    return number, needs_permit


def decode_assignment(frame: bytes) -> Assignment:
    try:
        _, _, _, _, generation, attempt, timeout_ms, *sizes = _ASSIGN.unpack_from(frame)
        id_end, name_end, args_end, kwargs_end, stored_end, head_end = sizes
        texts = frame[_ASSIGN.size : -_NUMBER_BYTES].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed assignment: {error}") from error
    name_end += id_end
    args_end += name_end
    kwargs_end += args_end
    stored_end += kwargs_end
    if stored_end + head_end > len(texts) or (not head_end and stored_end != len(texts)):
        raise ProtocolError("malformed assignment: its texts do not add up to its length")
    return Assignment(
        texts[:id_end],
        generation,
        texts[id_end:name_end],
        attempt,
        texts[name_end:args_end],
        texts[args_end:kwargs_end],
        None if timeout_ms == _NO_TIMEOUT else timeout_ms,
        _node_part(texts, stored_end, head_end) if head_end else None,
        texts[kwargs_end:stored_end],
    )


def _node_texts(node: NodePart) -> tuple[str, str]:
    """Return a header with the task's workflow data, followed by the texts of the results. Results may be
    large, so the parent neither parses nor rewrites them.
    """
    sources = [(*source[:3], len(source.result), *source[4:]) for source in node.sources]
    place = (node.workflow_id, node.task_index, node.root_workflow_id, node.depth)
    # The standard library's json is not used, because it takes five times as long for both writing and
    # reading.
    head = to_json((place, node.inputs_json, sources)).decode()
    return head, "".join(source.result for source in node.sources)


def _node_part(texts: str, start: int, head_size: int) -> NodePart:
    end = start + head_size
    try:
        place, inputs_json, described = from_json(texts[start:end])
        workflow_id, task_index, root_workflow_id, depth = place
        sources = []
        for index, kind, task_name, size, key, summary in described:
            begin, end = end, end + size
            sources.append(NodeInput(index, kind, task_name, texts[begin:end], key, summary))
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError("malformed assignment: its workflow data cannot be read") from error
    if end != len(texts):
        raise ProtocolError("malformed assignment: its texts do not add up to its length")
    return NodePart(workflow_id, task_index, inputs_json, tuple(sources), root_workflow_id, depth)


def encode_report(report: ChildReport, rss_bytes: int = 0, run_microseconds: int = 0) -> bytes:
    """Return the frame with `report`, the duration of the attempt, and the child's memory if it was
    sampled.
    """
    task_id, result = report.task_id, report.result_json
    code, message = report.error_code, report.error_message
    flags, rest = _SUCCESS, ""
    try:
        if not report.ok or report[4:] != _NOTHING_ELSE:
            flags, result, rest = _uncommon_parts(report)
        body = f"{task_id}{result}{code or ''}{message or ''}{rest}".encode()
    except UnicodeEncodeError:
        return encode_report(_without_surrogates(report), rss_bytes, run_microseconds)
    header = _REPORT.pack(
        _REPORT.size - 4 + len(body),
        _KIND_REPORT,
        report.generation,
        flags,
        rss_bytes,
        run_microseconds,
        len(task_id),
        len(result),
        _NO_TEXT if code is None else len(code),
        _NO_TEXT if message is None else len(message),
    )
    return header + body


def _uncommon_parts(report: ChildReport) -> tuple[int, str, str]:
    """Return the flags of a report, its result or its wait, and the text of its optional fields."""
    names, seconds, traceparent = report.exception_names, report.retry_after, report.traceparent
    has_rest = (
        bool(names)
        or seconds is not None
        or traceparent is not None
        or report.origin is not NO_ORIGIN
        or report.log is not None
    )
    flags = (
        report.ok
        | (not report.was_called) << 1
        | has_rest << 2
        | report.transaction << 3
        | (report.park is not None) << 5
    )
    fields = [names, seconds, traceparent, report.log, *report.origin]
    result = report.result_json if report.park is None else report.park.to_json()
    return flags, result, json.dumps(fields) if has_rest else ""


def decode_report(frame: bytes) -> tuple[ChildReport, int, int]:
    """Return the report in `frame`, the sampled memory in bytes (0 if it was not sampled), and the
    attempt's duration in microseconds.
    """
    try:
        head, texts = _REPORT.unpack_from(frame), frame[_REPORT_BYTES:].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed report: {error}") from error
    _, _, generation, flags, rss_bytes, run_microseconds, id_end, result_end, *sizes = head
    code_size, message_size = sizes
    result_end += id_end
    if not 0 <= run_microseconds <= _RUN_MICROSECONDS_MAX:
        raise ProtocolError("malformed report: impossible run time")
    if flags == _SUCCESS and result_end == len(texts) and code_size == message_size == _NO_TEXT:
        fields = texts[:id_end], generation, True, texts[id_end:], *_OF_SUCCESS
        return _new(ChildReport, fields), rss_bytes, run_microseconds
    code_end = result_end if code_size == _NO_TEXT else result_end + code_size
    message_end = code_end if message_size == _NO_TEXT else code_end + message_size
    if message_end > len(texts) or (message_end != len(texts) and not flags & 4):
        raise ProtocolError("malformed report: its texts do not add up to its length")
    report = ChildReport(
        texts[:id_end],
        generation,
        bool(flags & 1),
        texts[id_end:result_end],
        None if code_size == _NO_TEXT else texts[result_end:code_end],
        None if message_size == _NO_TEXT else texts[code_end:message_end],
        not flags & 2,
    )
    if flags & 0b11000:
        report = report._replace(transaction=TransactionEnd(flags >> 3 & 0b11))
    if flags & 0b100000:
        report = report._replace(park=_park_of(report.result_json), result_json="")
    if flags & 4:
        report = report._replace(**_rest_of_report(texts[message_end:]))
    return report, rss_bytes, run_microseconds


def _park_of(text: str) -> ParkRequest:
    try:
        return ParkRequest.from_json(text)
    except ValueError as error:
        raise ProtocolError("malformed report: the wait of its run cannot be read") from error


def _rest_of_report(text: str) -> dict[str, Any]:
    try:
        names, seconds, traceparent, log, *origin = json.loads(text)
        kind, place = map(_text_or_none, origin)
        return {
            "exception_names": tuple(map(str, names)),
            "retry_after": None if seconds is None else checked_delay(seconds),
            "traceparent": _text_or_none(traceparent),
            "origin": Origin(kind and kind[:TEXT_MAX], place and place[:TEXT_MAX]),
            "log": None if log is None else CapturedLog.checked(log),
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError("malformed report: its remaining fields cannot be read") from error


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _without_surrogates(report: ChildReport) -> ChildReport:
    """Return the report with lone surrogates, which occur in undecodable file names, written as escapes."""
    escaped: dict[str, Any] = {
        name: text.encode(errors="backslashreplace").decode()
        for name, text in report._asdict().items()
        if isinstance(text, str)
    }
    return report._replace(**escaped)


def encode_numbers(kind: FrameKind, first: int = 0, second: int = 0) -> bytes:
    """Return a frame with two numbers.

    They are the pid and the memory in bytes in hello and ready frames, and the numbers of the first and
    the last assignment in a batch frame. A stop frame does not use them.
    """
    return _NUMBERS.pack(_NUMBERS.size - 4, kind, first, second)


def decode_numbers(frame: bytes) -> tuple[int, int]:
    if len(frame) != _NUMBERS.size:
        raise ProtocolError(
            f"malformed frame: {len(frame)} bytes where {_NUMBERS.size} were expected"
        )
    _, _, first, second = _NUMBERS.unpack(frame)
    return int(first), int(second)


def encode_texts(kind: FrameKind, *texts: str) -> bytes:
    """Return a frame with a few texts; used where speed does not matter."""
    body = json.dumps(texts).encode()
    return _HEADER.pack(1 + len(body), kind) + body


def decode_texts(frame: bytes, count: int) -> list[str]:
    """Decode exactly `count` texts from `frame`."""
    try:
        texts = json.loads(frame[_HEADER.size :])
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed frame: its texts cannot be read") from error
    if not isinstance(texts, list) or len(texts) != count:
        raise ProtocolError(f"malformed frame: {count} texts were expected")
    if not all(isinstance(text, str) for text in texts):
        raise ProtocolError("malformed frame: a value is not a string")
    return texts


def encode_stopped(assignment: Assignment, log: CapturedLog | None = None) -> bytes:
    """Return the frame for a task that ended because the worker stopped it, with the log of the attempt."""
    texts = (assignment.task_id, str(assignment.generation), "" if log is None else json.dumps(log))
    return encode_texts(FrameKind.TASK_STOPPED, *texts)


def decode_stopped(frame: bytes) -> tuple[str, CapturedLog | None]:
    """Return the task that was stopped, and the log of the attempt."""
    task_id, _, log = decode_texts(frame, 3)
    try:
        return task_id, CapturedLog.checked(json.loads(log)) if log else None
    except (ValueError, RecursionError) as error:
        raise ProtocolError("malformed frame: the log of its task cannot be read") from error


def encode_progress(task_id: str, generation: int, done: float, total: float, note: str) -> bytes:
    """Return a frame with the progress of one of several tasks; `total` may be infinite or not a number."""
    values = (task_id, str(generation), repr(float(done)), repr(float(total)), note)
    return encode_texts(FrameKind.PROGRESS, *values)


def decode_progress(frame: bytes) -> ProgressReport:
    task_id, generation, done_text, total_text, note = decode_texts(frame, 5)
    try:
        done, total = float(done_text), float(total_text)
        number = int(generation)
    except ValueError as error:
        raise ProtocolError("malformed progress: its numbers cannot be read") from error
    if not math.isfinite(done):
        raise ProtocolError("malformed progress: its numbers are not finite")
    text = note.replace("\0", "\ufffd")[:NOTE_CHARACTERS_MAX] or None
    return ProgressReport(task_id, number, done, total if math.isfinite(total) else None, text)


def encode_boot(boot: ChildBoot, worker_pid: int) -> bytes:
    return encode_texts(FrameKind.BOOT, json.dumps(asdict(boot)), str(worker_pid))


def decode_boot(frame: bytes) -> tuple[ChildBoot, int]:
    boot_json, worker_pid = decode_texts(frame, 2)
    fields = json.loads(boot_json).items()
    boot: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields
    }
    boot["log_limits"] = LogLimits(*boot["log_limits"])
    return ChildBoot(**boot), int(worker_pid)


def receive_boot(connected: socket.socket) -> tuple[ChildBoot, int] | None:
    """Wait for the boot frame, and read no byte after it; None if the worker has ended."""
    length = connected.recv(4, socket.MSG_WAITALL)
    body = connected.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    return decode_boot(length + body) if body else None


class FrameBuffer:
    """Splits a stream of bytes, received in arbitrary pieces, into frames; `mark` precedes each frame."""

    __slots__ = ("_mark", "_start", "has_foreign_bytes", "pending")

    def __init__(self, mark: bytes = b"") -> None:
        self._mark = mark
        self._start = len(mark)
        # The beginning of an incomplete frame.
        self.pending = bytearray()
        # Whether there were bytes outside frames.
        self.has_foreign_bytes = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete with `data`, in order, and keep the incomplete rest."""
        start = self._start
        if (
            not self.pending
            and len(data) >= start + 5
            and _LENGTH(data, start)[0] + start + 4 == len(data)
            and data.startswith(self._mark)
        ):
            # Nearly every frame arrives alone and complete.
            return [data[start:]]
        if self.pending:
            self.pending += data
            frames, end = self._cut(self.pending)
            del self.pending[:end]
            return frames
        frames, end = self._cut(data)
        self.pending += data[end:]
        return frames

    def _cut(self, data: bytes | bytearray) -> tuple[list[bytes], int]:
        """Return the complete frames in `data`, and the position where an incomplete frame starts."""
        frames = []
        mark, end = self._mark, 0
        while (start := self._next_mark(data, end)) + len(mark) <= len(data) - 5:
            head = start + len(mark)
            size = checked_size(data[head : head + 5])
            if head + 4 + size > len(data):
                break
            end = head + 4 + size
            frames.append(bytes(data[head:end]))
        return frames, start

    def _next_mark(self, data: bytes | bytearray, start: int) -> int:
        """Return the position where the next frame starts, or may start after further bytes have arrived."""
        mark = self._mark
        if data.startswith(mark, start):
            return start
        found = data.find(mark, start)
        if found < 0:
            found = max(start, len(data) - len(mark) + 1)
            while not mark.startswith(data[found:]):
                found += 1
        self.has_foreign_bytes |= found > start
        return found

    @property
    def pending_bytes(self) -> int:
        """Return how many bytes of an incomplete frame have arrived."""
        return max(0, len(self.pending) - len(self._mark))

    def wanted_bytes(self) -> int:
        """Return how many bytes the incomplete frame still needs; 0 if its length is unknown."""
        start = len(self._mark)
        if len(self.pending) < start + 4:
            return 0
        size = int.from_bytes(self.pending[start : start + 4], "big")
        return start + 4 + size - len(self.pending)


def checked_size(header: bytes | bytearray) -> int:
    """Return the length in the first five bytes of a frame; raise ProtocolError if no frame of its kind can
    have this length.
    """
    size, kind = _HEADER.unpack(header)
    if not 1 <= size <= _LONGEST.get(kind, 0):
        raise ProtocolError(f"a frame of kind {kind} claims a length of {size} bytes")
    return int(size)
