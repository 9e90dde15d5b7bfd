"""Frames between the worker's parent process and its children: how a claimed task reaches a child
and how the child's report comes back.

A frame is a four-byte length, a kind byte and a body of fixed numbers and length-prefixed UTF-8
texts. Nothing here builds objects from names: whatever a child writes, the parent either reads one
of the values below or raises ``WireError``, and then only that child is lost.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from struct import Struct

MAX_FRAME_BYTES = 1 << 30


class FrameKind(IntEnum):
    """What a frame means; the first three travel to the child, the rest come back."""

    BOOT = 1
    ASSIGN = 2
    STOP = 3
    HELLO = 4
    READY = 5
    REPORT = 6
    STOPPED = 7
    HOOK_FAILED = 8
    BOOT_FAILED = 9


class WireError(Exception):
    """The bytes on a child's socket are not a frame this side may receive."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt of one task, handed to one child."""

    task_id: str
    generation: int
    task_name: str
    attempt: int
    args_json: str
    kwargs_json: str
    timeout_ms: int | None


@dataclass(frozen=True, slots=True)
class ChildReport:
    """What came of an assignment: the encoded result, and an error's code and message."""

    task_id: str
    generation: int
    ok: bool
    result_json: str
    error_code: str | None
    error_message: str | None


@dataclass(frozen=True, slots=True)
class ChildBoot:
    """Everything a child or the template needs to start; it crosses ``exec`` as JSON.

    ``program`` names the function that loads the application and gives the child something to
    execute assignments with.
    """

    app_locator: str
    modules: tuple[str, ...] = ()
    sys_path_roots: tuple[str, ...] = ()
    log_level: str = "INFO"
    log_format: str = "text"
    samples_memory: bool = False
    hook_budget_seconds: float = 10.0
    program: str = "horsies.worker.execute:load_program"


_HEADER = Struct("!IB")
_ASSIGN = Struct("!IBqiqIIII")
_REPORT = Struct("!IBqBqIIII")
_NUMBERS = Struct("!IBqq")
_NO_TEXT = 0xFFFFFFFF
_NO_TIMEOUT = -1

_KIND_ASSIGN = int(FrameKind.ASSIGN)
_KIND_REPORT = int(FrameKind.REPORT)


def encode_assignment(assignment: Assignment) -> bytes:
    """The frame that hands `assignment` to a child."""
    task_id = assignment.task_id.encode()
    name = assignment.task_name.encode()
    args = assignment.args_json.encode()
    kwargs = assignment.kwargs_json.encode()
    timeout_ms = assignment.timeout_ms
    body = b"".join((task_id, name, args, kwargs))
    return (
        _ASSIGN.pack(
            _ASSIGN.size - 4 + len(body),
            _KIND_ASSIGN,
            assignment.generation,
            assignment.attempt,
            _NO_TIMEOUT if timeout_ms is None else timeout_ms,
            len(task_id),
            len(name),
            len(args),
            len(kwargs),
        )
        + body
    )


def decode_assignment(frame: bytes) -> Assignment:
    """The assignment in `frame`."""
    try:
        _, _, generation, attempt, timeout_ms, *lengths = _ASSIGN.unpack_from(frame)
        task_id, name, args, kwargs = _texts(frame, _ASSIGN.size, lengths)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed assignment: {error}") from error
    if task_id is None or name is None or args is None or kwargs is None:
        raise WireError("malformed assignment: a text is missing")
    return Assignment(
        task_id=task_id,
        generation=generation,
        task_name=name,
        attempt=attempt,
        args_json=args,
        kwargs_json=kwargs,
        timeout_ms=None if timeout_ms == _NO_TIMEOUT else timeout_ms,
    )


def encode_report(report: ChildReport, rss_bytes: int = 0) -> bytes:
    """The frame that carries `report`, with the child's memory when it was sampled."""
    task_id = report.task_id.encode()
    result = report.result_json.encode()
    code = _optional_bytes(report.error_code)
    message = _optional_bytes(report.error_message)
    body = b"".join((task_id, result, code or b"", message or b""))
    return (
        _REPORT.pack(
            _REPORT.size - 4 + len(body),
            _KIND_REPORT,
            report.generation,
            report.ok,
            rss_bytes,
            len(task_id),
            len(result),
            _NO_TEXT if code is None else len(code),
            _NO_TEXT if message is None else len(message),
        )
        + body
    )


def decode_report(frame: bytes) -> tuple[ChildReport, int]:
    """The report in `frame` and the sampled memory in bytes (0 when it was not sampled)."""
    try:
        _, _, generation, ok, rss_bytes, *lengths = _REPORT.unpack_from(frame)
        task_id, result, code, message = _texts(frame, _REPORT.size, lengths)
    except (struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed report: {error}") from error
    if task_id is None or result is None:
        raise WireError("malformed report: a text is missing")
    return ChildReport(task_id, generation, bool(ok), result, code, message), rss_bytes


def encode_numbers(kind: FrameKind, first: int = 0, second: int = 0) -> bytes:
    """A frame of two numbers: hello and ready carry (pid, memory in bytes), a stop carries none."""
    return _NUMBERS.pack(_NUMBERS.size - 4, kind, first, second)


def decode_numbers(frame: bytes) -> tuple[int, int]:
    """The two numbers in `frame`."""
    if len(frame) != _NUMBERS.size:
        raise WireError(f"malformed frame: {len(frame)} bytes where {_NUMBERS.size} were expected")
    _, _, first, second = _NUMBERS.unpack(frame)
    return int(first), int(second)


def encode_texts(kind: FrameKind, *texts: str) -> bytes:
    """A frame of a few texts; used where speed does not matter."""
    body = json.dumps(texts).encode()
    return _HEADER.pack(1 + len(body), kind) + body


def decode_texts(frame: bytes, count: int) -> list[str]:
    """Exactly `count` texts out of `frame`."""
    try:
        texts = json.loads(frame[_HEADER.size :])
    except (ValueError, RecursionError) as error:
        raise WireError("malformed frame: its texts cannot be read") from error
    if not isinstance(texts, list) or len(texts) != count:
        raise WireError(f"malformed frame: {count} texts were expected")
    if not all(isinstance(text, str) for text in texts):
        raise WireError("malformed frame: something that is not a text")
    return texts


def encode_boot(boot: ChildBoot, worker_pid: int) -> bytes:
    """The first frame a fresh interpreter reads: what to load, and whose child it is."""
    return encode_texts(FrameKind.BOOT, json.dumps(asdict(boot)), str(worker_pid))


def decode_boot(frame: bytes) -> tuple[ChildBoot, int]:
    """The boot values and the worker's pid in `frame`."""
    boot_json, worker_pid = decode_texts(frame, 2)
    fields = json.loads(boot_json)
    fields["modules"] = tuple(fields["modules"])
    fields["sys_path_roots"] = tuple(fields["sys_path_roots"])
    return ChildBoot(**fields), int(worker_pid)


def receive_boot(connected: socket.socket) -> tuple[ChildBoot, int] | None:
    """Wait for the boot frame and take not one byte more; None when the worker is gone."""
    length = connected.recv(4, socket.MSG_WAITALL)
    body = connected.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    return decode_boot(length + body) if body else None


class FrameBuffer:
    """Cuts a stream of bytes into frames, however the socket happened to chop it."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes, in order; the rest waits for more."""
        is_alone = not self._pending and len(data) >= 5
        if is_alone and int.from_bytes(data[:4], "big") + 4 == len(data):
            # Nearly every frame arrives alone and whole: it needs no copy.
            return [data]
        self._pending += data
        return self._cut()

    def wanted_bytes(self) -> int:
        """How many bytes the frame in progress still needs; 0 when its length is unknown."""
        if len(self._pending) < 4:
            return 0
        return int.from_bytes(self._pending[:4], "big") + 4 - len(self._pending)

    def _cut(self) -> list[bytes]:
        frames = []
        pending = self._pending
        start = 0
        while len(pending) - start >= 4:
            size = int.from_bytes(pending[start : start + 4], "big")
            if not 1 <= size <= MAX_FRAME_BYTES:
                raise WireError(f"a frame claims a length of {size} bytes")
            end = start + 4 + size
            if end > len(pending):
                break
            frames.append(bytes(pending[start:end]))
            start = end
        del pending[:start]
        return frames


def _optional_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode(errors="backslashreplace")


def _texts(frame: bytes, start: int, lengths: list[int]) -> list[str | None]:
    texts: list[str | None] = []
    for length in lengths:
        if length == _NO_TEXT:
            texts.append(None)
            continue
        texts.append(frame[start : start + length].decode())
        start += length
    if start != len(frame):
        raise WireError("malformed frame: its texts do not add up to its length")
    return texts
