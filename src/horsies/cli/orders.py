"""Bulk orders on the command line: the dry run, the confirmation, the batches and the command to continue."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from horsies.cli import output
from horsies.cli.session import EXIT_FAILED, EXIT_NOT_FOUND, Session, exit_with, unwrap_or_exit
from horsies.monitor.order_plan import Order, OrderState, OrderVerb, Preview, merged
from horsies.monitor.orders import (
    carry_out,
    no_such_order,
    order_script,
    preview_script,
    stop_script,
)
from horsies.result import Err
from horsies.tasks.broker import BrokerErrorCode, BrokerResult

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Count the tasks that match; change nothing.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
OrderOption = Annotated[
    str | None,
    typer.Option(
        "--order",
        metavar="ID",
        help="Continue this bulk order; tasks that it already changed are skipped.",
    ),
]


@dataclass(frozen=True, slots=True)
class BulkCommand:
    """A command that changes all matching tasks, with its switches and the words of its continue
    command.
    """

    session: Session
    verb: OrderVerb
    words: tuple[str, ...]
    dry_run: bool
    yes: bool
    as_json: bool

    def run(self, *drafts: BrokerResult[Order]) -> bool:
        """Show the dry run of one or more orders, ask for confirmation, and execute them. Return whether
        they were executed.
        """
        previews: list[Preview] = []
        for draft in drafts:
            if isinstance(draft, Err):
                raise typer.BadParameter(draft.err_value.message)
            script = preview_script(draft.ok_value)
            previews.append(unwrap_or_exit(self.session.broker.perform(_READING, script)))
        preview = merged(previews)
        is_last = self.dry_run or not preview.eligible
        if is_last or not self.as_json:
            self._show_preview(preview)
        if is_last:
            return False
        if not self.yes:
            order = preview.order
            ask(order.words.question.format(order.counted(preview.eligible)))
        for one in previews:
            self._carry_out(one.order)
        return True

    def resume(self, order_id: str) -> None:
        """Continue an order whose command was stopped, was killed or lost the database.

        A draft can be started only in the dashboard, by its author.
        """
        if self.dry_run:
            raise typer.BadParameter("--order continues an order; leave out --dry-run.")
        state = unwrap_or_exit(self.session.broker.perform(_READING, order_script(order_id)))
        if state is None:
            exit_with(no_such_order(order_id).message, EXIT_NOT_FOUND)
        if state.order.verb is not self.verb:
            exit_with(f"Order {order_id} is a {state.order.verb.value} order.", EXIT_FAILED)
        if state.outcome == "draft":
            made = f"Order {order_id} is a dry run that {state.actor} made in the dashboard"
            exit_with(
                f"{made} and has not started; start it there, or name its filters here.",
                EXIT_FAILED,
            )
        self._carry_out(state.order)

    def _carry_out(self, order: Order) -> None:
        words = shlex.join(["horsies", *self.words, "--order", order.id])
        continuing = f"To continue without changing anything twice: {words}"
        try:
            done = carry_out(self.session.broker, order, _show_progress)
        except KeyboardInterrupt:
            self.session.broker.perform(_READING, stop_script(order.id))
            exit_with(f"Interrupted. {continuing}", EXIT_FAILED)
        if isinstance(done, Err):
            exit_with(f"{done.err_value.message} {continuing}", EXIT_FAILED)
        self._show_state(done.ok_value)

    def _show_preview(self, preview: Preview) -> None:
        if self.as_json:
            output.print_json(preview.document())
            return
        if not preview.matching:
            typer.echo("No task matches.")
            return
        typer.echo(preview.summary)
        newest, oldest = output.timestamp(preview.newest_at), output.timestamp(preview.oldest_at)
        typer.echo(f"newest {newest}, oldest {oldest}")
        if self.verb.erases:
            typer.echo(f"for example {preview.newest_id}")
        if preview.has_more and preview.oldest_at is not None:
            until = preview.oldest_at.isoformat(timespec="milliseconds")
            typer.echo(
                f"This is the most for one order; for older tasks: --until {until}", err=True
            )

    def _show_state(self, state: OrderState) -> None:
        if self.as_json:
            output.print_json(state.document())
            return
        refused = sum(state.progress.refused.values())
        line = f"{state.order.counted(state.progress.done)} {state.order.words.done}"
        line += f", {refused:,} refused" if refused else ""
        typer.echo(f"{line}; order {state.order.id} is {state.outcome}.")


def ask(question: str) -> None:
    """End the command unless the user says yes."""
    if not sys.stdin.isatty():
        exit_with(f"{question} Standard input is not a terminal: add --yes.", EXIT_FAILED)
    if not typer.confirm(question, err=True):
        exit_with("Nothing was changed.", EXIT_FAILED)


def _show_progress(state: OrderState) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{state.seen:,} of {state.order.matching:,}", err=True, nl=False)
