"""Changes to a single key of a queue: its limits, pause and resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from pydantic import ValidationError
from starlette.responses import Response

from horsies.config.app import PerKey
from horsies.db.statements.keys import KeyState
from horsies.errors import HorsiesError
from horsies.monitor.documents import key_document
from horsies.monitor.keys import KeyLimits, Keys, limit_words, rate_parts
from horsies.result import Result
from horsies.tasks.recording import acting_as
from horsies.web.answers import bad_input, both, done, fields_of, is_api, text_field, unwrapped
from horsies.web.reading import BadRequest
from horsies.web.rendering import Handler, Route, View

_NAMES = ", ".join(KeyLimits.__annotations__)


async def _key_of(view: View) -> tuple[Keys, str, str]:
    """Return the site's `Keys`, and the queue and the key that the request names."""
    name, key = view.params["name"], (await fields_of(view)).get("key")
    if not isinstance(key, str):
        raise BadRequest("key must be the key as text.", code="INVALID_VALUE")
    broker = view.site.broker
    known = list(view.site.queue_caps) if view.site.app else None
    return Keys(lambda: broker, known), name, key


def _switch_key(paused: bool) -> Handler:
    async def handler(view: View) -> Response:
        keys, name, key = await _key_of(view)
        reason = await text_field(view, "reason")
        with acting_as(view.access.user, "web"):
            if paused:
                result = await keys.pause_async(name, key, reason=reason)
            else:
                result = await keys.resume_async(name, key)
        state = unwrapped(view, result, _page(name))
        notice = f"Key {state.key} of queue {name} is {'' if state.is_paused else 'not '}paused."
        return done(view, _page(name), notice, key_document(state))

    return handler


async def set_key(view: View) -> Response:
    """Set the limits of one key, as ``app.keys.set`` does."""
    keys, name, key = await _key_of(view)
    reason, limits = await text_field(view, "reason"), await _limits_of(view)
    with acting_as(view.access.user, "web"):
        try:
            result = await keys.set_async(name, key, reason=reason, **limits)
        except ValidationError as error:
            raise bad_input(view, _page(name), _sentence(error)) from None
    return _limited(view, result)


def _sentence(refused: ValidationError) -> str:
    """Return the sentence about a wrong limit, without the place in the code that such an error shows."""
    detail = refused.errors(include_url=False, include_input=False)[0]
    error = detail.get("ctx", {}).get("error")
    text = error.message if isinstance(error, HorsiesError) else detail["msg"]
    return text.removeprefix(f"{PerKey.__name__}.")


async def clear_key(view: View) -> Response:
    """Remove a key's own limits, so that the limits of its queue apply again."""
    keys, name, key = await _key_of(view)
    with acting_as(view.access.user, "web"):
        result = await keys.clear_async(name, key)
    return _limited(view, result)


def _limited(view: View, result: Result[KeyState, Any]) -> Response:
    """Return the response to a change of limits; its notice names the limits that apply now."""
    name = view.params["name"]
    state = unwrapped(view, result, _page(name))
    notice = f"The limits of key {state.key} of queue {name}: {limit_words(state)}."
    return done(view, _page(name), notice, key_document(state))


def _page(queue: str) -> str:
    return f"/queues/{queue}"


async def _limits_of(view: View) -> KeyLimits:
    fields = await fields_of(view)
    if not is_api(view):
        try:
            return _typed_limits(fields)
        except ValueError as error:
            raise bad_input(view, _page(view.params["name"]), str(error)) from None
    limits = {name: value for name, value in fields.items() if name not in ("key", "reason")}
    if not limits or not limits.keys() <= KeyLimits.__annotations__.keys():
        sentence = f"A change of a key has key, reason and at least one of {_NAMES}."
        raise BadRequest(sentence, code="INVALID_VALUE")
    return cast(KeyLimits, limits)


def _typed_limits(fields: Mapping[str, str]) -> KeyLimits:
    """Convert the fields of the form to the members of a JSON body; a limit with a blank field does not
    change. Raises ValueError with a sentence.
    """
    typed = {name: text for name in _FORMS if (text := fields.get(name, "").strip())}
    limits = {name: _parsed(name, text) for name, text in typed.items()}
    burst = limits.pop("burst", None)
    if burst is not None:
        if "rate" not in limits:
            raise ValueError("A burst needs a rate.")
        limits["rate"]["burst"] = burst
    if not limits:
        raise ValueError(f"Enter at least one of the limits {_NAMES}.")
    return cast(KeyLimits, limits)


def _rate(text: str) -> dict[str, float]:
    count, seconds = rate_parts(text)
    return {"count": count, "per_seconds": seconds}


# For each field of the form, the function that converts it, and the end of the error message if that fails.
_FORMS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_concurrency": (int, "must be a whole number"),
    "rate": (_rate, "takes a number of starts and a number of seconds, as 100/60"),
    "burst": (int, "must be a whole number"),
    "weight": (float, "must be a number"),
}


def _parsed(name: str, text: str) -> Any:
    convert, wanted = _FORMS[name]
    try:
        return convert(text)
    except ValueError:
        raise ValueError(f"{name} {wanted}, not {text[:40]!r}.") from None


ROUTES: tuple[Route, ...] = (
    *both("/queues/{name}/keys/pause", "pause_key", _switch_key(True)),
    *both("/queues/{name}/keys/resume", "pause_key", _switch_key(False)),
    *both("/queues/{name}/keys/set", "limit_key", set_key),
    *both("/queues/{name}/keys/clear", "limit_key", clear_key),
)
