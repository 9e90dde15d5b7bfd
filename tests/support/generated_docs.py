"""The parts of the documentation that are written by the code itself: tables.

A page holds such a part between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``. Running this
module (``make docs``) rewrites them; a test fails while one is out of date.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from horsies.cli.main import command_line
from horsies.codec.shape import type_text
from horsies.config.app import (
    AppConfig,
    CustomQueueConfig,
    PayloadConfig,
    Rate,
    RecoveryConfig,
    WorkerResilienceConfig,
)
from horsies.config.postgres import PostgresConfig
from horsies.config.schedules import ScheduleConfig, TaskSchedule, WorkflowSchedule
from horsies.config.tracing import TracingConfig
from horsies.error_codes import ContractCode, OperationalErrorCode, OutcomeCode, RetrievalCode
from horsies.errors import ErrorCode
from horsies.findings import GROUPS
from horsies.monitor.diagnose.doctor import CHECKS
from horsies.monitor.metrics import CATALOGUE, Metric
from horsies.retry import RetryPolicy
from horsies.states import TaskStatus
from horsies.tasks.handle import TaskActionErrorCode
from horsies.tasks.request import TaskSendErrorCode
from horsies.workflow.run.info import HandleErrorCode, WorkflowStartErrorCode
from tests.support import doc_pages, site_map
from tests.support.api_page import api_reference
from tests.support.code_remedies import AT_THE_START, REMEDIES
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
    *(API, CLI, CODES),
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
    TracingConfig,
    RetryPolicy,
    ScheduleConfig,
    TaskSchedule,
    WorkflowSchedule,
)
COMMANDS = (
    *("dev", "run", "demo", "init", "db url", "db psql"),
    *("worker", "scheduler", "web", "check", "migrate", "version", "health", "metrics"),
    "docs",
    *("status", "workers", "queues", "tasks", "show", "explain", "cancel", "retry", "history"),
    "schedules",
    *("workflows", "workflow show", "workflow pause", "workflow resume", "workflow cancel"),
    *("workflow retry", "workflow signal", "workflow audit", "doctor"),
    *("durable show", "durable signal", "durable resume", "durable reset", "durable export"),
)

# The page that explains the codes of each enumeration.
CODE_PLACES: dict[type[Enum], tuple[str, str]] = {
    OperationalErrorCode: ("results.md", "OperationalErrorCode"),
    ContractCode: ("results.md", "ContractCode"),
    RetrievalCode: ("results.md", "RetrievalCode"),
    OutcomeCode: ("results.md", "OutcomeCode"),
    TaskActionErrorCode: ("results.md", "Cancelling"),
    TaskSendErrorCode: ("sending.md", "Errors are values"),
    WorkflowStartErrorCode: ("workflows-steering.md", "Starting"),
    HandleErrorCode: ("workflows-steering.md", "What cannot be done"),
    ErrorCode: ("configuration.md", "Start-up errors"),
}

# Limits that the models check themselves, where pydantic's annotations do not show them. The tests
# try every one of them.
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
    """Return which generated parts a page holds."""
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
    kind = type_text(field.annotation).replace(" | None", " or `None`")
    limits = _limits(field) if (model, name) not in LIMITS else _range(*LIMITS[model, name])
    return f"{kind}, {limits}" if limits else kind


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


def flags_table(command_name: str) -> str:
    """Return one row per argument and flag of a command."""
    command: Any = typer.main.get_command(command_line())
    for word in command_name.split():
        command = command.commands[word]
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    rows = [[_flag(one), _flag_default(one), one.help or ""] for one in shown]
    return table(["Flag", "Default", "Meaning"], rows) if rows else "No flags."


def _flag(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in parameter.opts)


def _flag_default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False:
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


def commands_table() -> str:
    """Return one row per command: its purpose, and the page with its flags."""
    program: Any = typer.main.get_command(command_line())
    rows = [
        [f"`horsies {name}`", _purpose(command), _page_of(f"horsies {name}")]
        for name, command in sorted(_commands(program))
        if not command.hidden
    ]
    return table(["Command", "Purpose", "Page"], rows)


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if below := getattr(command, "commands", None):
            yield from _commands(command, f"{before}{name} ")
            if not below or not command.invoke_without_command:
                continue
        yield f"{before}{name}", command


def _purpose(command: Any) -> str:
    paragraph = " ".join((command.help or "").strip().split("\n\n", 1)[0].split())
    return re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0]


def _page_of(part: str) -> str:
    """Return a link to the page that has this part, or nothing."""
    for path in PAGES:
        if f"<!-- begin: {part} -->" in path.read_text("utf-8"):
            return f"[{path.stem}]({path.name})"
    return ""


def codes_list() -> str:
    """Return one section per code: its families with their meanings, and the first step."""
    entries: dict[str, list[str]] = {}
    for codes, (page, heading) in CODE_PLACES.items():
        anchor = heading.lower().replace(" ", "-")
        for cells in doc_pages.rows(doc_pages.section(doc_pages.page(page), heading)):
            is_error = codes is ErrorCode
            meaning = _without_links(cells[2 if is_error else 1])
            name = f" (`{doc_pages.code_of(cells[1])}`)" if is_error else ""
            line = f"- [{codes.__name__}]({page}#{anchor}){name}: {meaning}."
            entries.setdefault(doc_pages.code_of(cells[0]), []).append(line)
    return "\n\n".join(
        "\n".join(
            [f"### {code}", "", *lines, "", f"**What to do:** {REMEDIES.get(code, AT_THE_START)}"]
        )
        for code, lines in sorted(entries.items())
    )


def _without_links(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("\\|", "|")


def reasons_table() -> str:
    """Return one row per reason of an explanation."""
    rows = [
        [group, f"`{code}`", "yes" if entry.blocks else "", entry.meaning, entry.remedy]
        for group, entries in GROUPS.items()
        for code, entry in entries.items()
    ]
    return table(["Of", "Code", "Obstacle", "Meaning", "Remedy"], rows)


def transitions_table() -> str:
    """Return one row per verb of the task's life cycle."""
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
    """Return the layers of the package, topmost first."""
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
    for name in COMMANDS:
        yield f"horsies {name}", lambda name=name: flags_table(name)  # type: ignore[misc]
    yield "transitions", transitions_table
    yield "layers", layers_picture
    yield "metrics", metrics_table
    yield "checks", checks_table
    yield "reasons", reasons_table
    yield "api", api_reference
    yield "commands", commands_table
    yield "codes", codes_list


PARTS: dict[str, Callable[[], str]] = dict(_parts())


if __name__ == "__main__":
    main()
