"""Generates the tables of the documentation from the code. A page has a generated part between ``<!--
begin: NAME -->`` and ``<!-- end: NAME -->``. Running this module (``make docs``) rewrites these parts; a
test fails if a part is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer.main
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from horsies.cli.main import command_line
from horsies.codec.shape import type_text
from horsies.config.app import (
    AppConfig,
    CustomQueueConfig,
    LogCapture,
    PayloadConfig,
    Rate,
    RecoveryConfig,
    WorkerResilienceConfig,
)
from horsies.config.postgres import PostgresConfig
from horsies.config.schedules import ScheduleConfig, TaskSchedule, WorkflowSchedule
from horsies.config.tracing import TracingConfig
from horsies.config.webhooks import Webhook
from horsies.error_codes import ContractCode, OperationalErrorCode, OutcomeCode, RetrievalCode
from horsies.errors import ErrorCode
from horsies.findings import GROUPS
from horsies.monitor.diagnose.doctor import CHECKS
from horsies.monitor.metrics import CATALOGUE, Metric
from horsies.retry import RetryPolicy
from horsies.states import TaskStatus
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.handle import TaskActionErrorCode
from horsies.tasks.request import TaskSendErrorCode
from horsies.workflow.run.info import HandleErrorCode, WorkflowStartErrorCode
from tests.support import api_page, site_map
from tests.support.code_remedies import REMEDIES
from tests.support.transitions import TASK_TRANSITIONS

REPOSITORY = Path(__file__).parents[2]
CONFIGURATION = REPOSITORY / "docs" / "configuration.md"
WORKERS = REPOSITORY / "docs" / "workers.md"
STATE_MACHINE = REPOSITORY / "docs" / "internals" / "state-machine.md"
OPERATING = REPOSITORY / "docs" / "operating.md"
SCHEDULING = REPOSITORY / "docs" / "scheduling.md"
EXPLAIN = REPOSITORY / "docs" / "explain.md"
DASHBOARD = REPOSITORY / "docs" / "dashboard.md"
METRICS = REPOSITORY / "docs" / "metrics.md"
DOCTOR = REPOSITORY / "docs" / "doctor.md"
API = REPOSITORY / "docs" / "api.md"
API_PAGES = {name: REPOSITORY / "docs" / "api" / f"{name}.md" for name in api_page.PAGES.values()}
CLI = REPOSITORY / "docs" / "cli.md"
CODES = REPOSITORY / "docs" / "codes.md"
DEVELOPING = REPOSITORY / "docs" / "developing.md"
EMBEDDED = REPOSITORY / "docs" / "embedded.md"
NEW_PROJECT = REPOSITORY / "docs" / "new-project.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
PAGES = (
    *(CONFIGURATION, WORKERS, OPERATING, EXPLAIN, DASHBOARD, METRICS, DOCTOR, SCHEDULING),
    *(DEVELOPING, EMBEDDED, NEW_PROJECT),
    STATE_MACHINE,
    *(API, *API_PAGES.values(), CLI, CODES),
    CONTRIBUTING,
)

MODELS: tuple[type[BaseModel], ...] = (
    AppConfig,
    PostgresConfig,
    CustomQueueConfig,
    Rate,
    RecoveryConfig,
    WorkerResilienceConfig,
    PayloadConfig,
    LogCapture,
    TracingConfig,
    Webhook,
    RetryPolicy,
    ScheduleConfig,
    TaskSchedule,
    WorkflowSchedule,
)
# The guide page of each command.
COMMAND_GUIDES = {
    "cancel": "operating.md#cancelling",
    "check": "developing.md#checking-before-it-runs",
    "db psql": "embedded.md#other-programs",
    "db url": "embedded.md#other-programs",
    "demo": "new-project.md#the-demonstration",
    "dev": "developing.md#a-project-in-one-terminal",
    "docs": "getting-help.md",
    "doctor": "doctor.md",
    "durable export": "durable-functions.md",
    "durable reset": "durable-functions.md",
    "durable resume": "durable-functions.md",
    "durable show": "durable-functions.md",
    "durable signal": "durable-functions.md",
    "explain": "explain.md",
    "export": "personal-data.md#exporting",
    "failures": "operating.md#failures-by-reason",
    "health": "metrics.md",
    "history": "operating.md#history-of-changes",
    "init": "new-project.md",
    "keys": "keys.md#change-one-key-at-run-time",
    "logs": "operating.md#its-log",
    "metrics": "metrics.md",
    "migrate": "deployment.md#migrations",
    "queues": "operating.md#pausing-a-queue",
    "retry": "operating.md#sending-a-request-again",
    "delete": "personal-data.md#deleting",
    "redact": "personal-data.md#redacting",
    "run": "developing.md#running-a-stored-task-again",
    "scheduler": "scheduling.md#running-a-scheduler",
    "schedules": "operating.md#schedules",
    "show": "operating.md#one-task",
    "status": "operating.md#status",
    "tasks": "operating.md#finding-tasks",
    "version": "install.md",
    "web": "dashboard.md",
    "worker": "workers.md",
    "webhooks test": "webhooks.md#the-receiver",
    "workers": "operating.md#workers",
    "workflow audit": "workflows-steering.md#the-audit",
    "workflow cancel": "workflows-steering.md#controlling",
    "workflow pause": "workflows-steering.md#controlling",
    "workflow resume": "workflows-steering.md#controlling",
    "workflow retry": "workflows-steering.md#controlling",
    "workflow show": "workflows-steering.md#from-the-command-line",
    "workflow signal": "workflows-steering.md#controlling",
    "workflows": "workflows-steering.md#from-the-command-line",
}
# Flags that at least this many commands share are explained once.
SHARED_BY = 15

# The enumerations with codes, in the order in which an entry lists its families.
CODE_FAMILIES: tuple[type[Enum], ...] = (
    *(OperationalErrorCode, ContractCode, RetrievalCode, OutcomeCode),
    *(TaskActionErrorCode, TaskSendErrorCode, WorkflowStartErrorCode, HandleErrorCode),
    *(BrokerErrorCode, ErrorCode),
)

# Limits that validators check, so that pydantic's annotations do not show them; tests try every
# limit.
LIMITS: dict[tuple[type[BaseModel], str], tuple[int, int | None]] = {
    (PostgresConfig, "worker_pool_size"): (1, None),
    (PostgresConfig, "worker_max_overflow"): (0, None),
    (PostgresConfig, "worker_child_pool_min_size"): (0, None),
    (PostgresConfig, "worker_child_pool_max_size"): (1, None),
    (PostgresConfig, "tcp_keepalives_idle"): (1, 32_767),
    (PostgresConfig, "tcp_keepalives_interval"): (1, 32_767),
    (PostgresConfig, "tcp_keepalives_count"): (1, 127),
    (PostgresConfig, "tcp_user_timeout_ms"): (0, 2_147_483_647),
    (AppConfig, "cluster_wide_cap"): (1, None),
    (AppConfig, "prefetch_buffer"): (0, None),
    (AppConfig, "claim_lease_ms"): (2_000, None),
    (AppConfig, "max_claim_renew_age_ms"): (60_000, None),
}
TYPE_NAMES: dict[tuple[type[BaseModel], str], str] = {
    (AppConfig, "schedule"): "ScheduleConfig or `None`",
    (AppConfig, "webhooks"): "list of Webhook",
    (AppConfig, "exception_mapper"): "exception class to code",
    (AppConfig, "default_unhandled_error_code"): "upper case name",
    (
        RecoveryConfig,
        "paused_workflow_auto_cancel_after",
    ): "timedelta above 0, at most 100 years, or `None`",
    (RetryPolicy, "auto_retry_for"): "list of codes and exception classes, at least 1",
    (RetryPolicy, "intervals"): "list of int or float, each 0.001 to 86_400",
    (RetryPolicy, "backoff_strategy"): '`"fixed"` or `"exponential"`',
    (ScheduleConfig, "schedules"): "list of TaskSchedule and WorkflowSchedule",
    **{
        (model, name): text
        for model in (TaskSchedule, WorkflowSchedule)
        for name, text in {
            "pattern": "a pattern",
            "kwargs": "dict",
            "on_dst_gap": '`"skip"` or `"shift"`',
            "overlap": '`"allow"`, `"skip"` or `"queue"`',
        }.items()
    },
    (WorkflowSchedule, "definition"): "a definition, or its key",
    (TaskSchedule, "args"): "tuple",
    (TracingConfig, "parent"): '`"auto"`, `"always"` or `"never"`',
}

_PART = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
_DEFAULT_SENTENCE = re.compile(r"\s*(?:Defaults to [^:]*|Required)\.?$")


def main() -> None:
    """Rewrite the generated parts of every page, and the list of pages."""
    for page in PAGES:
        page.write_text(rewritten(page.read_text("utf-8")), "utf-8")
    site_map.LLMS.write_text(site_map.llms_text(), "utf-8")


def rewritten(text: str) -> str:
    """Return a page with its generated parts up to date."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}", text)


def names_of_parts(text: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [part[1] for part in _PART.findall(text)]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def config_table(model: type[BaseModel]) -> str:
    """Return one row per field of a configuration model."""
    models = [one for one in model.__mro__ if issubclass(one, BaseModel) and one is not BaseModel]
    meanings = {name: text for one in reversed(models) for name, text in _field_docstrings(one)}
    rows = [
        [
            f"`{field.alias or name}`",
            _default(field),
            _allowed(model, name, field),
            _meaning(meanings[name]),
        ]
        for name, field in model.model_fields.items()
    ]
    return table(["Field", "Default", "Allowed", "Meaning"], rows)


def _field_docstrings(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(after.value, ast.Constant)
            yield field.target.id, " ".join(str(after.value.value).split())


def _meaning(docstring: str) -> str:
    return _DEFAULT_SENTENCE.sub("", docstring).replace("Defaults to None: ", "None: ")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{_literal(value)}`"


def _literal(value: object) -> str:
    match value:
        case Enum():
            return str(f"{type(value).__name__}.{value.name}")
        case bool() | None | list() | dict():
            return repr(value)
        case int():
            return f"{value:_}"
        case BaseModel():
            return f"{type(value).__name__}()"
        case str():
            return f'"{value}"'
        case _:
            return repr(value)


def _allowed(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    if (model, name) in TYPE_NAMES:
        return TYPE_NAMES[model, name]
    kind = _kind(field.annotation)
    limits = _limits(field) if (model, name) not in LIMITS else _range(*LIMITS[model, name])
    return f"{kind}, {limits}" if limits else kind


def _kind(annotation: Any) -> str:
    """Describe a type in words, and a Literal by its values."""
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        *first, last = [f'`"{value}"`' for value in members]
        return f"{', '.join(first)} or {last}"
    if get_origin(annotation) is list and get_origin(members[0]) is Literal:
        return f"list of {_kind(members[0])}"
    return type_text(annotation).replace(" | None", " or `None`")


def _range(smallest: Any, largest: Any) -> str:
    return f"at least {smallest:_}" if largest is None else f"{smallest:_} to {largest:_}"


def _limits(field: FieldInfo) -> str:
    low = [limit.ge for limit in field.metadata if isinstance(limit, Ge)]
    high = [limit.le for limit in field.metadata if isinstance(limit, Le)]
    above = [limit.gt for limit in field.metadata if isinstance(limit, Gt)]
    match low, high, above:
        case [smallest], [largest], _:
            return _range(smallest, largest)
        case [smallest], _, _:
            return _range(smallest, None)
        case _, [largest], [bound]:
            return f"above {bound:_}, at most {largest:_}"
        case _, _, [bound]:
            return f"above {bound:_}"
        case _:
            return ""


def _visible(command: Any) -> list[Any]:
    return [one for one in command.params if not getattr(one, "hidden", False)]


def _row(parameter: Any) -> tuple[str, str, str]:
    return _flag(parameter), _flag_default(parameter), parameter.help or ""


def _flag(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in parameter.opts)


def _flag_default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False:
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


@lru_cache
def commands() -> dict[str, Any]:
    """Return every command of the help by its name without `horsies`."""
    program: Any = typer.main.get_command(command_line())
    return {name: one for name, one in sorted(_commands(program)) if not one.hidden}


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if below := getattr(command, "commands", None):
            yield from _commands(command, f"{before}{name} ")
            if not below or not command.invoke_without_command:
                continue
        yield f"{before}{name}", command


def commands_table() -> str:
    """Return one row per command: a link to its flags, and its purpose."""
    rows = [
        [f"[`horsies {name}`](#horsies-{name.replace(' ', '-')})", _purpose(command)]
        for name, command in commands().items()
    ]
    return table(["Command", "Purpose"], rows)


def _purpose(command: Any) -> str:
    paragraph = " ".join((command.help or "").strip().split("\n\n", 1)[0].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


@lru_cache
def shared_flags() -> dict[tuple[str, str, str], int]:
    """Return the flags that many commands share, in the order of the first command."""
    counts = Counter(_row(one) for command in commands().values() for one in _visible(command))
    return {row: count for row, count in counts.items() if count >= SHARED_BY}


def shared_flags_table() -> str:
    """Return one row per flag that many commands share."""
    return table(["Flag", "Default", "Meaning"], [list(row) for row in shared_flags()])


def flags_list() -> str:
    """Return one section per command: its purpose, its guide and its own flags."""
    return "\n\n".join(_flags_of(name, command) for name, command in commands().items())


def _flags_of(name: str, command: Any) -> str:
    shared = shared_flags()
    rows = [_row(one) for one in _visible(command)]
    own = [list(row) for row in rows if row not in shared]
    common = ", ".join(row[0].split(",")[0] for row in rows if row in shared)
    guide = COMMAND_GUIDES[name]
    title = doc_title(guide.partition("#")[0])
    parts = [
        f"### horsies {name}",
        f"{_purpose(command)} See [{title}]({guide}).",
        table(["Flag", "Default", "Meaning"], own) if own else "",
        f"Also takes {common}." if common else "",
    ]
    return "\n\n".join(part for part in parts if part)


def doc_title(name: str) -> str:
    """Return the title that the navigation gives a page."""
    return next(entry.title for entry in site_map.entries() if entry.name == name)


def codes_list() -> str:
    """Return one section per code: its families with their meanings, and the first step."""
    entries: dict[str, list[str]] = {}
    for family in CODE_FAMILIES:
        name = family.__name__
        for code, (member, meaning) in api_page.values_of(name).items():
            shown = f" (`{member}`)" if family is ErrorCode else ""
            entries.setdefault(code, []).append(
                f"- [{name}]({api_page.address(name)}){shown}: {meaning}"
            )
    return "\n\n".join(
        "\n".join([f"### {code}", "", *lines, "", f"**Remedy:** {REMEDIES[code]}"])
        for code, lines in sorted(entries.items())
    )


def reasons_table() -> str:
    """Return one row per reason of an explanation."""
    rows = [
        [group, f"`{code}`", "yes" if entry.blocks else "", entry.meaning, entry.remedy]
        for group, entries in GROUPS.items()
        for code, entry in entries.items()
    ]
    return table(["Of", "Code", "Obstacle", "Meaning", "Remedy"], rows)


def transitions_table() -> str:
    """Return one row per verb of a task's life cycle."""
    rows = [
        [f"`{one.verb}`", ", ".join(_ordered(one.from_statuses)), one.to_status.value]
        for one in TASK_TRANSITIONS
    ]
    return table(["Verb", "From", "To"], rows)


def _ordered(statuses: frozenset[TaskStatus]) -> list[str]:
    return [status.value for status in TaskStatus if status in statuses]


def checks_table() -> str:
    """Return one row per check of `horsies doctor`."""
    rows = [
        [
            f"`{one.id}`",
            one.looks_at,
            one.yellow or "-",
            one.red or "-",
            "yes" if one.is_cheap else "",
        ]
        for one in CHECKS
    ]
    return table(["Check", "Looks at", "Yellow", "Red", "Cheap"], rows)


def layers_picture() -> str:
    """Return the layers of the package, top layer first."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    package, *_ = settings["tool"]["importlinter"]["contracts"]
    return "\n".join(["```text", *package["layers"], "```"])


def metrics_table() -> str:
    """Return one row per metric of the catalogue."""
    rows = [[f"`{one.name}`", one.source, one.kind, _labels(one), one.text] for one in CATALOGUE]
    return table(["Metric", "Place", "Type", "Labels", "Meaning"], rows)


def _labels(metric: Metric) -> str:
    *names, last = metric.labels or ("",)
    values = f" = {', '.join(metric.values)}" if metric.values else ""
    return ", ".join(f"`{name}`" for name in (*names, last) if name) + values


def _parts() -> Iterator[tuple[str, Callable[[], str]]]:
    for model in MODELS:
        yield model.__name__, lambda model=model: config_table(model)  # type: ignore[misc]
    yield "transitions", transitions_table
    yield "layers", layers_picture
    yield "metrics", metrics_table
    yield "checks", checks_table
    yield "reasons", reasons_table
    yield "api", api_page.index
    yield "other names", api_page.other_names
    for page in API_PAGES:
        yield f"api: {page}", lambda page=page: api_page.reference(page)  # type: ignore[misc]
    yield "commands", commands_table
    yield "shared flags", shared_flags_table
    yield "flags", flags_list
    yield "codes", codes_list


PARTS: dict[str, Callable[[], str]] = dict(_parts())


if __name__ == "__main__":
    main()
