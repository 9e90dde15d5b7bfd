"""`horsies webhooks test`: send a test event to the receiver of a webhook."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from horsies.cli import output
from horsies.cli.options import LocatorArgument, ModuleOption, open_app
from horsies.cli.session import EXIT_FAILED, EXIT_NOT_FOUND, JsonOption, exit_with
from horsies.errors import RetryLater, TaskFailed
from horsies.webhooks.message import sample_event
from horsies.webhooks.task import deliver_event
from horsies.words import listed

if TYPE_CHECKING:
    from horsies.app import Horsies
    from horsies.config.webhooks import Webhook

webhooks = typer.Typer(help="Send a test event to a webhook.", no_args_is_help=True)


@webhooks.command("test")
def send_test(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the webhook.")],
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one signed event of type webhook.test to a webhook, from this machine, and print the
    response.

    The rules of a delivery apply: private addresses are refused unless the webhook allows them, and
    redirects are not followed. Nothing is stored, and a failed request is not repeated.

    Exit codes: 0 accepted, 1 not accepted, 4 no such webhook.

    Example:
        horsies webhooks test alerts shop.background:app
    """
    hook = _webhook(open_app("webhooks test", module or locator), name)
    started = time.monotonic()
    status, problem = _answer_of(hook)
    milliseconds = round((time.monotonic() - started) * 1000)
    if as_json:
        answer = {"status": status, "milliseconds": milliseconds, "problem": problem}
        output.print_json({"webhook": name, **answer})
    elif problem is None:
        typer.echo(f"The receiver of webhook {name!r} answered {status} after {milliseconds:,} ms.")
    else:
        typer.echo(f"{problem} ({milliseconds:,} ms)", err=True)
    if problem is not None:
        raise typer.Exit(EXIT_FAILED)


def _answer_of(hook: Webhook) -> tuple[int | None, str | None]:
    """Return the status of an accepting response, or the reason why the event was not accepted."""
    try:
        return deliver_event(hook, sample_event(hook.name)), None
    except TaskFailed as failed:
        return None, failed.message
    except RetryLater as later:
        return None, str(later)


def _webhook(app: Horsies, name: str) -> Webhook:
    known = {hook.name: hook for hook in app.config.webhooks}
    if name not in known:
        there = f"it has {listed(list(known))}" if known else "it has none"
        exit_with(f"The application has no webhook {name!r}; {there}.", EXIT_NOT_FOUND)
    return known[name]
