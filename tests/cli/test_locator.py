"""LOCATOR is the last argument of every command that takes an application."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.every_command import CONTEXTS, parsed

TAKE_APPLICATIONS = {
    path: context.command
    for path, context in CONTEXTS.items()
    if any("--module" in one.opts for one in context.command.params)
}
RUN = "01a1dd42"


@pytest.mark.parametrize("path", TAKE_APPLICATIONS)
def test_the_last_argument_is_the_locator(path: str) -> None:
    command = TAKE_APPLICATIONS[path]
    last = [one for one in command.params if one.param_type_name == "argument"][-1]
    assert (last.metavar or "").endswith(("LOCATOR", "[LOCATOR]"))
    option = next(one for one in command.params if "--module" in one.opts)
    assert option.help.startswith("Same as LOCATOR")


def test_a_command_that_takes_a_database_takes_an_application() -> None:
    databases = {
        path
        for path, context in CONTEXTS.items()
        if any("--database-url" in one.opts for one in context.command.params)
    }
    assert databases - set(TAKE_APPLICATIONS) == {"horsies demo"}  # it brings its own application


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("queues shop:app", {"action": None, "locator": "shop:app"}),
        ("queues shop/tasks.py", {"action": None, "locator": "shop/tasks.py"}),
        ("queues pause mail.eu", {"name": "mail.eu", "locator": None}),
        ("queues pause mail shop:app", {"name": "mail", "locator": "shop:app"}),
        ("queues pause mail -m shop:app", {"locator": None, "module": "shop:app"}),
        ("schedules shop:app", {"action": "list", "locator": "shop:app"}),
        ("schedules next a:b shop:app", {"name": "a:b", "locator": "shop:app"}),
        ("keys list api shop:app", {"queue": "api", "key": None, "locator": "shop:app"}),
        ("keys show api a:b shop:app", {"key": "a:b", "locator": "shop:app"}),
        (f"explain {RUN} charge:0", {"name": "charge:0", "locators": []}),
        (f"explain {RUN} a:app b=c:app", {"name": None, "locators": ["a:app", "b=c:app"]}),
        (f"explain {RUN} charge a:app", {"name": "charge", "locators": ["a:app"]}),
        (f"workflow signal {RUN} ok shop:app", {"value": "null", "locator": "shop:app"}),
        (f"workflow signal {RUN} ok true shop:app", {"value": "true", "locator": "shop:app"}),
        (f'durable signal {RUN} ok {{"a":true}}', {"value": '{"a":true}', "locator": None}),
        (f'durable signal {RUN} ok "a:b"', {"value": '"a:b"', "locator": None}),
        (f"durable reset {RUN} a:b", {"step": "a:b", "locator": None}),
        (f"durable show {RUN} shop:app", {"run_id": RUN, "locator": "shop:app"}),
    ],
)
def test_optional_arguments_before_the_locator_may_be_left_out(
    words: str, expected: dict[str, Any]
) -> None:
    params = parsed(words.split())
    assert {name: params[name] for name in expected} == expected
