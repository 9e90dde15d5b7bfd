"""`horsies keys`: list the keys of a queue, give one its own limits, pause and resume it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, assert_never

import typer

from horsies.cli import output
from horsies.cli.layout import Text
from horsies.cli.locator import name_before_locator
from horsies.cli.options import DatabaseUrlOption, LocatorArgument, ModuleOption
from horsies.cli.session import JsonOption, ReasonOption, open_session, unwrap_or_exit
from horsies.config.app import Rate
from horsies.db.statements.keys import KeyState
from horsies.modules import failure_at
from horsies.monitor.documents import key_document
from horsies.monitor.keys import (
    COUNT_MOST,
    LIST_LIMIT,
    LIST_LIMIT_MAX,
    KeyLimits,
    Keys,
    limit_words,
    rate_parts,
)
from horsies.tasks.broker import BrokerResult

_COLUMNS = ("KEY", "DUE", "IN FLIGHT", "LIMITS", "STATE")
# The widths that let a list of keys fit a terminal: longer keys and reasons of pauses are cut, and longer
# limits continue on the next line.
_KEY_WIDTH = 60
_REASON_WIDTH = 120
_LIMITS_WIDTH = 28


class KeyAction(StrEnum):
    LIST = "list"
    SHOW = "show"
    SET = "set"
    CLEAR = "clear"
    PAUSE = "pause"
    RESUME = "resume"


MaxConcurrencyOption = Annotated[
    int | None, typer.Option(min=0, help="set: the most tasks of the key in flight.")
]
RateOption = Annotated[
    str | None,
    typer.Option(metavar="COUNT/SECONDS", help="set: how many may start per period, as 100/60."),
]
BurstOption = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="set: how many of --rate may start at once.")
]
WeightOption = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=100, help="set: how many tasks start at a turn of the key, on average."
    ),
]
ListLimitOption = Annotated[
    int, typer.Option(min=1, max=LIST_LIMIT_MAX, help="list: how many keys to show.")
]


def keys(  # noqa: PLR0913, PLR0917
    action: Annotated[
        KeyAction,
        typer.Argument(
            metavar="[list|show|set|clear|pause|resume]",
            help="Without an action, the keys of the queue are listed.",
            show_default=False,
        ),
    ] = KeyAction.LIST,
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", help="The queue.")] = None,
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="The key, for every action except list.")
    ] = None,
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    max_concurrency: MaxConcurrencyOption = None,
    rate: RateOption = None,
    burst: BurstOption = 1,
    weight: WeightOption = None,
    limit: ListLimitOption = LIST_LIMIT,
    reason: ReasonOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the keys of a queue, or show, limit, pause or resume one of them.

    A list has the keys that were changed manually, and those with tasks in flight or due tasks. Workers on
    every host start no more tasks of a paused key; running tasks continue, and so do other keys. The limits
    of set apply to one key instead of those of its queue, until clear.

    A list cuts long keys and reasons; show and --json print them whole.

    Exit codes: 0 done, 1 failure, 4 no such queue.

    Example:
        horsies keys list api
        horsies keys set api acme --max-concurrency 10 --weight 3
        horsies keys pause api acme --reason 'the customer asked for it'
    """
    if action is not KeyAction.LIST:
        key, locator = name_before_locator(key, locator)
    limits = _limits(max_concurrency, rate, burst, weight)
    queue = _checked(action, queue, key, limits)
    with open_session("keys", module or locator, database_url) as session:
        caps = session.queue_caps
        found = Keys(lambda: session.broker, None if caps is None else list(caps))
        if action is KeyAction.LIST:
            _print_all(unwrap_or_exit(found.list(queue, limit=limit)), limit, as_json)
        else:
            done = _act(found, action, queue, key or "", limits, reason)
            _print_one(unwrap_or_exit(done), as_json)


def _checked(action: KeyAction, queue: str | None, key: str | None, limits: KeyLimits) -> str:
    """Return the queue; reject arguments that do not fit the action."""
    if queue is None or (key is None and action is not KeyAction.LIST):
        needs = "a queue" if action is KeyAction.LIST else "a queue and a key"
        usage = "QUEUE" if action is KeyAction.LIST else "QUEUE KEY"
        raise failure_at(
            None,
            f"horsies keys {action.value} needs {needs}.",
            help_text=f"horsies keys {action.value} {usage}",
        )
    if bool(limits) is not (action is KeyAction.SET):
        sentence = "horsies keys set needs --max-concurrency, --rate or --weight."
        if limits:
            sentence = "--max-concurrency, --rate and --weight belong to horsies keys set."
        raise typer.BadParameter(sentence)
    return queue


def _limits(
    max_concurrency: int | None, rate: str | None, burst: int, weight: float | None
) -> KeyLimits:
    limits = KeyLimits()
    if max_concurrency is not None:
        limits["max_concurrency"] = max_concurrency
    if rate is not None:
        limits["rate"] = _rate(rate, burst)
    if weight is not None:
        limits["weight"] = weight
    return limits


def _rate(text: str, burst: int) -> Rate:
    try:
        count, seconds = rate_parts(text)
        return Rate(count=count, per_seconds=seconds, burst=burst)
    except ValueError:
        raise typer.BadParameter(
            f"--rate takes a number of starts and a number of seconds, as 100/60, not {text!r}."
        ) from None


def _act(
    keys: Keys, action: KeyAction, queue: str, key: str, limits: KeyLimits, reason: str | None
) -> BrokerResult[KeyState]:
    match action:
        case KeyAction.SHOW | KeyAction.LIST:
            return keys.get(queue, key)
        case KeyAction.SET:
            return keys.set(queue, key, reason=reason, **limits)
        case KeyAction.CLEAR:
            return keys.clear(queue, key)
        case KeyAction.PAUSE:
            return keys.pause(queue, key, reason=reason)
        case KeyAction.RESUME:
            return keys.resume(queue, key)
        case _:
            assert_never(action)


def _print_all(states: Sequence[KeyState], limit: int, as_json: bool) -> None:
    if as_json:
        output.print_json({"keys": [key_document(one) for one in states]})
        return
    table = output.plain_table(*_COLUMNS, flexible="KEY")
    for one in states:
        limits = textwrap.fill(limit_words(one), _LIMITS_WIDTH)
        state = "paused" if one.is_paused else "open"
        table.add_row(_name_and_pause(one), _due(one), f"{one.in_flight:,}", limits, state)
    output.print_parts(table if states else "No key of this queue has tasks or limits of its own.")
    if len(states) == limit:
        typer.echo(f"The first {limit:,} keys are shown; there may be more.")


def _name_and_pause(state: KeyState) -> Text:
    """Return the key and, below it, since when and why it is paused."""
    name = output.safe_text(_cut(state.key, _KEY_WIDTH))
    if state.paused_at is not None:
        reason = _cut(f": {state.pause_reason}", _REASON_WIDTH) if state.pause_reason else ""
        since = f"\nsince {output.timestamp(state.paused_at)}{reason}"
        name.append_text(output.safe_text(since, "yellow"))
    return name


def _cut(text: str, width: int) -> str:
    """Return a text that fits, without its middle if it is longer: similar keys often differ at the end."""
    if len(text) <= width:
        return text
    end = width // 3
    return f"{text[: width - end - 1]}…{text[-end:]}"


def _print_one(state: KeyState, as_json: bool) -> None:
    if as_json:
        output.print_json(key_document(state))
        return
    since = (
        ""
        if state.first_due_at is None
        else f", the first since {output.timestamp(state.first_due_at)}"
    )
    starts = None if state.starts_at is None else output.timestamp(state.starts_at)
    facts = [
        ("key", f"{state.key} of queue {state.queue_name}"),
        ("state", _state(state)),
        ("due", f"{_due(state)}{since}"),
        ("in flight", f"{state.in_flight:,}"),
        ("limits", f"{limit_words(state)}{', set for this key' if state.is_own else ''}"),
        ("next start", starts),
    ]
    output.print_parts(output.fact_table(facts))


def _due(state: KeyState) -> str:
    return f"{state.due:,}{'+' if state.due == COUNT_MOST else ''}"


def _state(state: KeyState) -> str:
    if state.paused_at is None:
        return "open"
    reason = f": {state.pause_reason}" if state.pause_reason else ""
    return f"paused since {output.timestamp(state.paused_at)}{reason}"
