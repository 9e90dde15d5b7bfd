"""`app.keys`: list the keys of a queue, give one key its own limits, pause and resume it.

Changes are stored, apply to all workers immediately, and are recorded like changes to queues. A refused
change is returned as Err; a value out of range raises the same exception as in ``PerKey``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from horsies.config.app import PerKey, Rate
from horsies.db.statement import Script, Step
from horsies.db.statements.keys import (
    KeyState,
    clear_key,
    list_keys,
    pause_key,
    read_key,
    resume_key,
    set_key,
)
from horsies.monitor.actions import known_queue_script
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.keys import lane_key_problem
from horsies.tasks.recording import Action, Switched, perform_action, perform_action_async

T = TypeVar("T")

# Keys has a method named list, which hides the built-in type.
States: TypeAlias = list[KeyState]
Change: TypeAlias = Script[BrokerResult[Switched[KeyState]]]

LIST_LIMIT = 100
LIST_LIMIT_MAX = 1_000
# The number up to which due tasks of a key are counted.
COUNT_MOST = 1_000

_CHANGING = BrokerErrorCode.KEY_CHANGE_FAILED
_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


class KeyLimits(TypedDict, total=False):
    """The limits of one key; None restores the limit of the queue."""

    max_concurrency: int | None
    rate: Rate | None
    weight: float | None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of the queues; each method has an ``..._async`` version for use in event loops.

    Example:
        app.keys.set("api", "acme", max_concurrency=10, weight=3).unwrap()
        app.keys.pause("api", "acme", reason="the customer asked for it").unwrap()
    """

    get_broker: Callable[[], PostgresBroker]
    # The application's queues; None accepts every queue that is in use.
    configured: Sequence[str] | None = None

    def list(self, queue: str, *, limit: int = LIST_LIMIT) -> BrokerResult[States]:
        """Return the keys that were changed manually, and the keys with tasks in flight or due tasks.
        Paused keys come first, then the keys with the most due tasks. At most `limit` keys are read, up
        to 1,000; use ``get`` to read a single key.

        Example:
            waiting = {one.key: one.due for one in app.keys.list("api").unwrap()}
        """
        return _flat(self.get_broker().perform(_READING, self.list_script(queue, limit)))

    async def list_async(self, queue: str, *, limit: int = LIST_LIMIT) -> BrokerResult[States]:
        script = self.list_script(queue, limit)
        return _flat(await self.get_broker().perform_async(_READING, script))

    def get(self, queue: str, key: str) -> BrokerResult[KeyState]:
        """Return one key, with or without tasks.

        Example:
            assert app.keys.get("api", "acme").unwrap().in_flight <= 10
        """
        return _flat(self.get_broker().perform(_READING, self._get_script(queue, key)))

    async def get_async(self, queue: str, key: str) -> BrokerResult[KeyState]:
        script = self._get_script(queue, key)
        return _flat(await self.get_broker().perform_async(_READING, script))

    def set(
        self, queue: str, key: str, *, reason: str | None = None, **limits: Unpack[KeyLimits]
    ) -> BrokerResult[KeyState]:
        """Set the limits of one key; omitted limits stay unchanged. Raises pydantic's ValidationError
        for a value that ``PerKey`` rejects.

        Example:
            app.keys.set("api", "acme", rate=Rate(count=10, per_seconds=1)).unwrap()
        """
        return self._change("set_key", queue, key, _set_script(queue, key, limits), reason)

    async def set_async(
        self, queue: str, key: str, *, reason: str | None = None, **limits: Unpack[KeyLimits]
    ) -> BrokerResult[KeyState]:
        script = _set_script(queue, key, limits)
        return await self._change_async("set_key", queue, key, script, reason)

    def clear(self, queue: str, key: str) -> BrokerResult[KeyState]:
        """Remove the key's own limits, so that the queue's limits apply again. A paused key stays
        paused.
        """
        return self._change("clear_key", queue, key, _change_script(queue, key, clear_key))

    async def clear_async(self, queue: str, key: str) -> BrokerResult[KeyState]:
        script = _change_script(queue, key, clear_key)
        return await self._change_async("clear_key", queue, key, script)

    def pause(self, queue: str, key: str, *, reason: str | None = None) -> BrokerResult[KeyState]:
        """Start no more tasks of the key on any worker; tasks that a worker already holds are run, and
        other keys are served.
        """
        script = _pause_script(queue, key, reason)
        return self._change("pause_key", queue, key, script, reason)

    async def pause_async(
        self, queue: str, key: str, *, reason: str | None = None
    ) -> BrokerResult[KeyState]:
        script = _pause_script(queue, key, reason)
        return await self._change_async("pause_key", queue, key, script, reason)

    def resume(self, queue: str, key: str) -> BrokerResult[KeyState]:
        """Start tasks of the key again after a pause by an operator or by a failure
        (``on_failure="halt"``).
        """
        return self._change("resume_key", queue, key, _change_script(queue, key, resume_key))

    async def resume_async(self, queue: str, key: str) -> BrokerResult[KeyState]:
        script = _change_script(queue, key, resume_key)
        return await self._change_async("resume_key", queue, key, script)

    def list_script(self, queue: str, limit: int) -> Script[BrokerResult[States]]:
        if not 1 <= limit <= LIST_LIMIT_MAX:
            sentence = f"limit must be from 1 to {LIST_LIMIT_MAX:,}, not {limit}."
            return Err(BrokerOperationError(BrokerErrorCode.INVALID_QUERY, sentence))
        known = yield from known_queue_script(queue, self.configured)
        if isinstance(known, Err):
            return known
        found: States = yield list_keys(queue, limit, COUNT_MOST)
        return Ok(found)

    def _get_script(self, queue: str, key: str) -> Script[BrokerResult[KeyState]]:
        refusal = yield from self._refusal_script(queue, key)
        if refusal is not None:
            return Err(refusal)
        (state,) = yield read_key(queue, key, COUNT_MOST)
        assert isinstance(state, KeyState)
        return Ok(state)

    def _refusal_script(self, queue: str, key: str) -> Script[BrokerOperationError | None]:
        """Return the reason why a key is invalid: its text or its queue."""
        if problem := lane_key_problem(key):
            sentence = f"{problem[:1].upper()}{problem[1:]}."
            return BrokerOperationError(BrokerErrorCode.INVALID_QUERY, sentence)
        known = yield from known_queue_script(queue, self.configured)
        return known.err_value if isinstance(known, Err) else None

    def _checked(self, queue: str, key: str, change: Change) -> Change:
        refusal = yield from self._refusal_script(queue, key)
        if refusal is not None:
            return Err(refusal)
        return (yield from change)

    def _change(
        self, verb: str, queue: str, key: str, script: Change, reason: str | None = None
    ) -> BrokerResult[KeyState]:
        action = Action(verb, subject_of(queue, key), reason)
        script = self._checked(queue, key, script)
        return _flat(perform_action(self.get_broker(), _CHANGING, action, script)).map(_state)

    async def _change_async(
        self, verb: str, queue: str, key: str, script: Change, reason: str | None = None
    ) -> BrokerResult[KeyState]:
        action = Action(verb, subject_of(queue, key), reason)
        script = self._checked(queue, key, script)
        done = await perform_action_async(self.get_broker(), _CHANGING, action, script)
        return _flat(done).map(_state)


def subject_of(queue: str, key: str) -> str:
    """Return the name of a key in the record of changes."""
    return f"key {key} of queue {queue}"


def limit_words(state: KeyState) -> str:
    """Describe the limits that apply to a key."""
    parts = []
    if state.max_concurrency is not None:
        parts.append(f"at most {state.max_concurrency:,}")
    if state.rate_seconds is not None:
        parts.append(_rate_words(state.rate_seconds))
        parts += [f"burst {state.rate_burst:,}"] if (state.rate_burst or 1) > 1 else []
    if state.weight != 1:
        parts.append(f"weight {state.weight:g}")
    if state.is_fifo:
        parts.append("in order, halts after a failure" if state.halts else "in order")
    return ", ".join(parts) or "none"


def _rate_words(seconds: float) -> str:
    return f"{1 / seconds:,.4g} per second" if seconds <= 1 else f"1 per {seconds:,.4g} s"


def rate_parts(text: str) -> tuple[int, float]:
    """Read a rate written as COUNT/SECONDS, as 100/60; the seconds default to 1. Raises ValueError for
    other texts.
    """
    count, _, seconds = text.partition("/")
    return int(count), float(seconds or 1)


def _flat(done: BrokerResult[BrokerResult[T]]) -> BrokerResult[T]:
    return done.and_then(lambda result: result)


def _state(switched: Switched[KeyState]) -> KeyState:
    return switched.state


def _set_script(queue: str, key: str, limits: KeyLimits) -> Change:
    """Check the limits immediately, to raise errors here; return the script that stores them."""
    given = {name: value for name, value in limits.items() if value is not None}
    if unknown := set(limits) - set(KeyLimits.__annotations__):
        names = ", ".join(KeyLimits.__annotations__)
        raise TypeError(f"keys.set() takes {names}, not {', '.join(sorted(unknown))}")
    if not limits:
        raise TypeError("keys.set() needs a limit: max_concurrency, rate or weight")
    checked: Any = PerKey.model_validate(given)
    rate: Rate | None = checked.rate
    step = set_key(
        queue,
        key,
        list(limits),
        checked.max_concurrency,
        None if rate is None else rate.seconds_per_start,
        None if rate is None else rate.burst,
        checked.weight if "weight" in given else None,
    )
    return _stored_script(queue, key, step)


def _pause_script(queue: str, key: str, reason: str | None) -> Change:
    return _stored_script(queue, key, pause_key(queue, key, reason))


def _change_script(queue: str, key: str, change: Callable[[str, str], Step]) -> Change:
    return _stored_script(queue, key, change(queue, key))


def _stored_script(queue: str, key: str, step: Step) -> Change:
    (before,) = yield read_key(queue, key, 1)
    yield step
    (after,) = yield read_key(queue, key, COUNT_MOST)
    assert isinstance(before, KeyState)
    assert isinstance(after, KeyState)
    return Ok(Switched(after, _limits_of(before) != _limits_of(after)))


def _limits_of(state: KeyState) -> tuple[object, ...]:
    """Return the values that an operator can change."""
    rate = state.rate_seconds, state.rate_burst
    pause = state.is_paused, state.pause_reason
    return state.max_concurrency, rate, state.weight, state.is_own, pause
