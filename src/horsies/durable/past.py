"""The past of a run: its recorded steps, as one call of the durable function reaches them again. A step
is identified by its name and occurrence, not by its position, because concurrent steps end in any order
and the code may reach recorded steps in another order. No I/O here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable

from horsies.codec.calls import payload_bytes
from horsies.db.statements.durable import RecordedStep
from horsies.durable.leaving import Parked, RunCancelled, Unreadable
from horsies.encryption import missing_key
from horsies.error_codes import OutcomeCode
from horsies.errors import DurableMisuse
from horsies.parking import ParkRequest

STEPS_MAX = 10_000
RECORD_BYTES_MAX = 32 * 1024 * 1024
NAME_CHARACTERS_MAX = 128
# Suffixes of the rows that belong to a step: its failed tries by number, the limit of its wait, and
# the finish of a clean-up step.
TRY = "!try"
LIMIT = "!until"
DONE = "!done"
# Marks the place in the record at which the run was cancelled; clean-up steps follow.
CANCEL = "!cancel"


def checked_name(name: object) -> str:
    """Return the name of a step or a change; raise DurableMisuse if the name cannot be stored."""
    is_name = isinstance(name, str) and 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
    if not is_name or "#" in str(name) or "!" in str(name):
        raise DurableMisuse(
            f"The name of a step is a printable text of 1 to {NAME_CHARACTERS_MAX} characters without '#' "
            "and '!'; give it one with ctx.with_options(name=...)."
        )
    return str(name)


class Past:
    """The recorded steps of a run, the steps that this call has not reached yet, and the names assigned
    so far.
    """

    def __init__(self, steps: Iterable[RecordedStep] = ()) -> None:
        self._steps = {step.name: _readable(step) for step in steps}
        self.is_cancelled = CANCEL in self._steps
        last = self._steps[CANCEL].position if self.is_cancelled else math.inf
        # The code need not reach a recorded patch again: a guard may be removed once its new code stays.
        self._unvisited = dict.fromkeys(
            step.name
            for step in self._steps.values()
            if step.position < last and step.kind != "patch"
        )
        self._has_tries = any(step.kind == "try" for step in self._steps.values())
        self._counts: dict[str, int] = {}
        self._position = max((step.position for step in self._steps.values()), default=0)
        self._bytes = sum(_size(step) for step in self._steps.values())
        # Concurrent steps use this object from several threads.
        self._lock = threading.Lock()

    def name(self, base: str) -> str:
        """Return the name of the next occurrence: "charge", then "charge#2" and so on."""
        with self._lock:
            number = self._counts[base] = self._counts.get(base, 0) + 1
        return base if number == 1 else f"{base}#{number}"

    def visit(self, name: str, kind: str) -> RecordedStep | None:
        """Return the recorded step of this name, or None. Hold the run if the recorded step is of
        another kind.
        """
        with self._lock:
            step = self._steps.get(name)
            if step is None:
                return None
            self._unvisited.pop(name, None)
            if self._has_tries:
                self._visit_tries(name)
        if step.kind != kind:
            raise mismatch(f"a {kind} {name!r}", f"a {step.kind} of that name")
        return step

    def _visit_tries(self, name: str) -> None:
        """Mark the failed tries of a step as reached together with the step."""
        number = 1
        while (tried := f"{name}{TRY}{number}") in self._unvisited:
            del self._unvisited[tried]
            number += 1

    def admit(self, name: str, beside: Collection[str] = ()) -> None:
        """Allow an unrecorded step if all recorded steps were reached, except steps that run
        concurrently. Otherwise the code has changed, and the run is held.
        """
        if self._unvisited:
            missing = next((one for one in self._unvisited if one not in beside), None)
            if missing is not None:
                raise mismatch(f"step {name!r}", f"{missing!r}")
        if self.is_cancelled:
            raise RunCancelled
        if len(self._steps) >= STEPS_MAX:
            raise DurableMisuse(
                f"This run has {STEPS_MAX:,} recorded steps, the most that a run may have; continue with "
                "an empty record: ctx.continue_as(...)."
            )
        if self._bytes > RECORD_BYTES_MAX:
            raise DurableMisuse(
                f"The record of this run has more than {RECORD_BYTES_MAX // 1024**2} MB; store the data "
                "elsewhere and record references."
            )

    def begin_clean_up(self) -> None:
        """Allow the clean-up steps of a cancelled run. Hold the run if its code has not registered all
        of them again.
        """
        missing = [one for one in self._unvisited if self._steps[one].kind == "on_cancel"]
        if missing:
            raise mismatch("no further clean-up step", f"{missing[0]!r}")
        self._unvisited.clear()
        self.is_cancelled = False

    def last_try(self, name: str) -> tuple[int, float]:
        """Return the number of tries of a step before this call, and the seconds until its next try."""
        tries, left_seconds = 0, 0.0
        while (step := self.visit(f"{name}{TRY}{tries + 1}", "try")) is not None:
            tries, left_seconds = tries + 1, step.left_seconds or 0.0
        return tries, left_seconds

    @property
    def unvisited(self) -> list[str]:
        """Return the recorded steps that this call has not reached, in the order of their record."""
        return list(self._unvisited)

    def next_position(self) -> int:
        with self._lock:
            self._position += 1
            return self._position

    def add(self, step: RecordedStep) -> None:
        """Add a newly recorded step; this call or a faster, earlier attempt has recorded it."""
        with self._lock:
            self._steps[step.name] = _readable(step)
            self._unvisited.pop(step.name, None)
            self._bytes += _size(step)


def _readable(step: RecordedStep) -> RecordedStep:
    key_id = missing_key(step.result or "", step.error or "")
    if key_id is not None:
        raise Unreadable(key_id)
    return step


def _size(step: RecordedStep) -> int:
    return payload_bytes(step.result or "") + payload_bytes(step.error or "")


def mismatch(asked: str, recorded: str) -> Parked:
    """Return the exception that holds a run, because its code no longer fits its record."""
    code = OutcomeCode.DURABLE_MISMATCH.value
    return Parked(
        ParkRequest(
            problem=f"{code}: the code asks for {asked}, the record goes on with {recorded}; "
            "deploy the code that wrote the record or guard the change with ctx.patched(...), then resume "
            "the run; or reset it to an earlier step."
        )
    )
