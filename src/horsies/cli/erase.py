"""`horsies delete` and `horsies redact`: erase tasks and runs that have ended, in bulk orders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import psycopg
import typer

from horsies.cli import output
from horsies.cli.changes import (
    CodeOption,
    NameOption,
    QueueOption,
    SinceOption,
    StatusOption,
    TaskIdsArgument,
    UntilOption,
    command_words,
    filters_of,
    split_locator,
)
from horsies.cli.options import DatabaseUrlOption, ModuleOption
from horsies.cli.orders import BulkCommand, DryRunOption, OrderOption, YesOption, ask
from horsies.cli.session import (
    EXIT_NOT_FOUND,
    JsonOption,
    ReasonOption,
    Session,
    exit_with,
    full_id,
    open_session,
    unwrap_or_exit,
)
from horsies.db.errors import describe
from horsies.db.payload_keeper import PayloadKeeper
from horsies.encryption import is_opaque
from horsies.ids import stored_form
from horsies.monitor.arguments import Argument, ArgumentProblem, NoMask, parse_argument
from horsies.monitor.erasing import forget_key_script, key_queues_script
from horsies.monitor.order_plan import ENDLESS, ORDER_MAX, SCOPES, Order, OrderVerb, draft_order
from horsies.monitor.personal_data import PersonalData, Wanted, find_script, sorted_script
from horsies.monitor.queries import TaskFilters
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerResult
from horsies.tasks.recording import Action, perform_action

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED
_OUT_OF_REACH = (
    "Not reached: copies that your code made; log lines and spans that were written; the log of the "
    "database server; events that webhooks have delivered; the log and the error message of a batch, "
    "which its other tasks keep; deliveries of findings, unless --key names their key; backups, the WAL of "
    "this server and its replicas, and dead row versions until VACUUM. See `horsies docs personal-data`."
)

KeyOption = Annotated[
    str | None,
    typer.Option(help="All tasks and runs with this key, such as a customer's key."),
]
ArgumentOption = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="All tasks with this argument, order_id=17, or with this text in any argument. The search text "
        "is not stored.",
    ),
]
WithRunsOption = Annotated[
    bool,
    typer.Option("--with-runs", help="Include the whole run of a task that belongs to a workflow."),
]


@dataclass(frozen=True, slots=True)
class Choice:
    """The tasks that a command line selects: by ids, filters, a key or an argument."""

    ids: list[str]
    filters: TaskFilters | None
    key: str | None
    argument: Argument | None
    with_runs: bool

    @property
    def is_found(self) -> bool:
        """Whether the ids come from a search. Otherwise each batch of an order applies the filters."""
        return self.key is not None or self.argument is not None or self.with_runs


def delete(  # noqa: PLR0913, PLR0917
    task_ids: TaskIdsArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    key: KeyOption = None,
    argument: ArgumentOption = None,
    status: StatusOption = None,
    queue: QueueOption = None,
    name: NameOption = None,
    error_code: CodeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    with_runs: WithRunsOption = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    order: OrderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete ended tasks permanently, with their attempts, results, logs and steps.

    Name tasks or runs by id, or choose tasks by key, argument or filters. The counts are shown first.

    Exit codes: 0 done, 1 failure or refusal, 4 no such task.

    Example:
        horsies delete --argument customer_id=17 --dry-run shop.background:app
        horsies delete --name send_mail --until 30d --yes
    """
    filters = filters_of(status, queue, name, error_code, None, since, until)
    chosen = Choice(task_ids or [], filters, key, parsed_argument(argument), with_runs)
    _erase(
        OrderVerb.DELETE_TASKS,
        chosen,
        (module, database_url),
        reason,
        order,
        (dry_run, yes, as_json),
    )


def redact(  # noqa: PLR0913, PLR0917
    task_ids: TaskIdsArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    key: KeyOption = None,
    argument: ArgumentOption = None,
    status: StatusOption = None,
    queue: QueueOption = None,
    name: NameOption = None,
    error_code: CodeOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    with_runs: WithRunsOption = False,
    reason: ReasonOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    order: OrderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the payload of ended tasks, and keep the record that they ran.

    Arguments, results, messages, headers, keys, logs and steps are removed; names, times, statuses and error
    codes are kept. A redacted task cannot be sent again. The tasks are chosen as for `horsies delete`.

    Exit codes: 0 done, 1 failure or refusal, 4 no such task.

    Example:
        horsies redact --argument customer_id=17 --dry-run shop.background:app
        horsies redact 01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8a --yes
    """
    filters = filters_of(status, queue, name, error_code, None, since, until)
    chosen = Choice(task_ids or [], filters, key, parsed_argument(argument), with_runs)
    switches = (dry_run, yes, as_json)
    _erase(OrderVerb.REDACT_TASKS, chosen, (module, database_url), reason, order, switches)


def parsed_argument(text: str | None) -> Argument | None:
    """Parse --argument; reject a text that is not a search."""
    try:
        return None if text is None else parse_argument(text, NoMask())
    except ArgumentProblem as problem:
        raise typer.BadParameter(str(problem), param_hint="--argument") from problem


def _erase(
    verb: OrderVerb,
    chosen: Choice,
    place: tuple[str | None, str | None],
    reason: str | None,
    order: str | None,
    switches: tuple[bool, bool, bool],
) -> None:
    """Delete or redact the selected tasks and runs, or continue an earlier order."""
    _refuse_both(chosen)
    is_bulk = chosen.filters is not None or chosen.key is not None or chosen.argument is not None
    ids, locator = split_locator(chosen.ids, is_bulk=is_bulk or order is not None)
    command, module = verb.value.removesuffix("_tasks"), place[0] or locator
    with open_session(command, module, place[1]) as session:
        bulk = BulkCommand(session, verb, command_words(command, module), *switches)
        chosen = replace(chosen, ids=subject_ids(session, ids))
        if order is not None:
            if is_bulk or ids:
                raise typer.BadParameter("--order stands alone: the order has its own filters.")
            bulk.resume(order)
        else:
            _run(bulk, chosen, reason)
        if not bulk.dry_run:
            _delete_objects(session)
    if not switches[2]:
        typer.echo(_OUT_OF_REACH, err=True)


def _delete_objects(session: Session) -> None:
    """Delete the large payload of the erased tasks from the object store; a worker retries a failed
    deletion.
    """
    database = session.broker.database
    if database.config.store is None:
        return
    try:
        while PayloadKeeper(database).delete_released():
            pass
    except psycopg.Error as error:
        typer.echo(
            f"A worker will delete large payload within an hour: {describe(error)}", err=True
        )


def _refuse_both(chosen: Choice) -> None:
    if chosen.key is not None and (chosen.argument is not None or _has_task_filters(chosen)):
        raise typer.BadParameter(
            "--key stands alone, or with --since and --until.", param_hint="--key"
        )


def _has_task_filters(chosen: Choice) -> bool:
    filters = chosen.filters or TaskFilters()
    return replace(filters, since=None, until=None) != TaskFilters()


def subject_ids(session: Session, given: list[str]) -> list[str]:
    """Complete the abbreviated ids of tasks and runs; one invalid id ends the command."""
    found = [full_id(session, one) for one in given]
    for one in found:
        if stored_form(one) is None:
            exit_with(
                f"{one!r} is not the id of a task or run; nothing was changed.", EXIT_NOT_FOUND
            )
    return list(dict.fromkeys(found))


def _run(bulk: BulkCommand, chosen: Choice, reason: str | None) -> None:
    """Execute the orders for the selected tasks and runs; then forget the key, if the user named one."""
    if chosen.is_found and not (chosen.ids and chosen.with_runs):
        wanted = wanted_by(bulk.session, chosen)
        found = unwrap_or_exit(bulk.session.broker.perform(_READING, find_script(wanted)))
        _report(found, chosen)
        ids = [*found.tasks, *(found.runs if chosen.with_runs else found.parts)]
        is_done = bool(ids) and bulk.run(*_drafts(bulk.verb, ids, reason, wanted.description))
        if not ids:
            _say_nothing_matches(bulk)
        is_whole = chosen.filters is None and (chosen.with_runs or not found.runs)
        is_last = is_done or bulk.dry_run or not ids
        if chosen.key is not None and is_whole and is_last:
            _forget_key(bulk, chosen.key, reason, is_confirmed=is_done)
        return
    ids = chosen.ids
    if chosen.ids and chosen.with_runs:
        named = unwrap_or_exit(bulk.session.broker.perform(_READING, sorted_script(chosen.ids)))
        ids = [*named.tasks, *named.runs]
    if ids:
        bulk.run(*_drafts(bulk.verb, ids, reason, None))
    else:
        filters = chosen.filters or TaskFilters()
        bulk.run(draft_order(bulk.verb, filters, reason=reason, limit=ENDLESS))


def _say_nothing_matches(bulk: BulkCommand) -> None:
    if bulk.as_json:
        output.print_json({"verb": bulk.verb.value, "matching": 0, "eligible": 0, "refused": {}})
    else:
        typer.echo("No task matches.")


def _drafts(
    verb: OrderVerb, ids: list[str], reason: str | None, found_by: str | None
) -> list[BrokerResult[Order]]:
    """Return the orders for these ids; each order has at most 10,000 ids."""
    return [
        draft_order(
            verb,
            TaskFilters(),
            ids=ids[start : start + ORDER_MAX],
            reason=reason,
            found_by=found_by,
        )
        for start in range(0, len(ids), ORDER_MAX)
    ]


def _forget_key(bulk: BulkCommand, key: str, reason: str | None, *, is_confirmed: bool) -> None:
    """Delete a key's limits, pause and history in all queues where no open task uses the key. With
    --json, messages are printed to standard error.
    """
    broker = bulk.session.broker
    queues = unwrap_or_exit(broker.perform(_READING, key_queues_script(key)))
    if not queues:
        return
    count = f"{len(queues):,} queue{'' if len(queues) == 1 else 's'}"
    typer.echo(f"The key has limits, a pause or a history in {count}.", err=bulk.as_json)
    if bulk.dry_run:
        return
    if not (bulk.yes or is_confirmed):
        ask("Forget them permanently?")
    action = Action(bulk.verb.value, "a key", reason)
    done = perform_action(broker, BrokerErrorCode.KEY_CHANGE_FAILED, action, forget_key_script(key))
    is_forgotten = unwrap_or_exit(unwrap_or_exit(done))
    done_words = "The key is forgotten." if is_forgotten else "An open task has the key: it stays."
    typer.echo(done_words, err=bulk.as_json)


def wanted_by(session: Session, chosen: Choice) -> Wanted:
    """Return the search of a command line. Filters alone, without a status, match ended tasks only."""
    known = session.app.definitions() if session.app is not None else {}
    parameters = {name: one.signature.names.positional for name, one in known.items()}
    filters = chosen.filters or TaskFilters()
    if chosen.key is None and chosen.argument is None and not filters.statuses:
        ended = [TaskStatus(one) for one in SCOPES[OrderVerb.DELETE_TASKS].default]
        filters = replace(filters, statuses=ended)
    argument = chosen.argument
    if argument is not None and is_opaque(session.broker.config):
        argument = argument.among_encrypted()
    return Wanted(chosen.key, argument, filters, parameters)


def _report(found: PersonalData, chosen: Choice) -> None:
    """Print the rows that the search found but the orders do not erase."""
    if found.runs and not chosen.with_runs:
        count = f"{len(found.runs):,} run{'' if len(found.runs) == 1 else 's'}"
        typer.echo(f"{count} of workflows also match: --with-runs takes them whole.", err=True)
    if found.schedules:
        names = ", ".join(found.schedules)
        typer.echo(
            f"These schedules have the argument and stay: {names}. Remove or replace them first.",
            err=True,
        )
