"""Horsies: a task queue and workflow engine for Python that needs no server except PostgreSQL.

Import all public names from this package.

Example:
    from horsies import Horsies

    app = Horsies("postgresql://localhost/shop")

    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    print(add.enqueue(1, 2).result(timeout_ms=10_000))
"""

from typing import TYPE_CHECKING

from horsies._version import __version__

# Imported eagerly, because the function has the same name as its module; the import system would
# otherwise bind the name to the module.
from horsies.current_task import CurrentTask, current_batch, current_task

if TYPE_CHECKING:
    from horsies.app import ChildProcessStartHook, Horsies, get_current_app
    from horsies.codec.fernet import FernetCodec
    from horsies.config.app import (
        AppConfig,
        CustomQueueConfig,
        LogCapture,
        PayloadConfig,
        PayloadPolicy,
        PerKey,
        QueueMode,
        Rate,
        RecoveryConfig,
        WorkerResilienceConfig,
    )
    from horsies.config.postgres import PostgresConfig
    from horsies.config.schedules import ScheduleConfig, TaskSchedule, WorkflowSchedule
    from horsies.config.tracing import TracingConfig
    from horsies.config.webhooks import Webhook
    from horsies.db.statements.keys import KeyState
    from horsies.db.statements.monitor import (
        ExpiredTask,
        QueueState,
        StaleTask,
        WorkerStateSnapshot,
        WorkerStats,
    )
    from horsies.db.statements.schedules import ScheduleRun, ScheduleState
    from horsies.db.statements.tasks import TaskAttemptInfo, TaskProgress
    from horsies.durable.async_context import AsyncDurable, AsyncDurableSteps
    from horsies.durable.calls import Child, StepCall
    from horsies.durable.context import Durable, DurableSteps
    from horsies.durable.handle import DurableHandle, DurableInfo, DurableStep
    from horsies.encryption import PayloadCodec
    from horsies.error_codes import (
        BUILTIN_CODE_REGISTRY,
        BuiltInTaskCode,
        ContractCode,
        OperationalErrorCode,
        OutcomeCode,
        RetrievalCode,
    )
    from horsies.errors import (
        ConfigurationError,
        DurableMisuse,
        ErrorCode,
        HorsiesError,
        MultipleValidationErrors,
        NoCurrentTaskError,
        RegistryError,
        ResultTimeout,
        ResultUnavailable,
        RetryLater,
        SourceLocation,
        StepFailed,
        TaskDefinitionError,
        TaskFailed,
        TaskStopped,
        TaskWatchFailed,
        TransactionMisuse,
        ValidationReport,
        WorkflowContextMissingIdError,
        WorkflowValidationError,
    )
    from horsies.monitor.actions import TaskRetried
    from horsies.monitor.health import DatabasePing, WorkerPong
    from horsies.payload_store import PayloadStore, TableStore
    from horsies.result import Err, Ok, Result, UnwrapError, is_err, is_ok
    from horsies.retry import ExceptionMapper, RetryPolicy
    from horsies.s3_store import S3Store
    from horsies.states import (
        TASK_TERMINAL_STATES,
        WORKFLOW_TASK_TERMINAL_STATES,
        WORKFLOW_TERMINAL_STATES,
        TaskAttemptOutcome,
        TaskStatus,
        WorkflowStatus,
        WorkflowTaskStatus,
    )
    from horsies.task import TaskFunction, TaskSendFailed, TaskSendOptions
    from horsies.task_result import SubWorkflowError, SubWorkflowSummary, TaskError, TaskResult
    from horsies.tasks.batch import Batch
    from horsies.tasks.broker import (
        BrokerErrorCode,
        BrokerOperationError,
        BrokerResult,
        PostgresBroker,
    )
    from horsies.tasks.handle import (
        TaskActionError,
        TaskActionErrorCode,
        TaskCancelled,
        TaskHandle,
        TaskInfo,
    )
    from horsies.tasks.options import Debounce, OutgoingTask, TaskOptions
    from horsies.tasks.request import (
        TaskSendError,
        TaskSendErrorCode,
        TaskSendPayload,
        TaskSendResult,
    )
    from horsies.tasks.send import TaskCall
    from horsies.tasks.transaction import INJECTED, AsyncTaskTransaction, TaskTransaction
    from horsies.timetable.next_run import calculate_next_run
    from horsies.timetable.patterns import (
        BothDays,
        ByMonthDay,
        ByWeekday,
        CronSchedule,
        DailySchedule,
        DaySelector,
        EitherDay,
        EveryDay,
        HourlySchedule,
        IntervalSchedule,
        MonthlySchedule,
        SchedulePattern,
        WeeklySchedule,
    )
    from horsies.timetable.terms import (
        CronEnumRange,
        CronEnumStep,
        CronEnumValues,
        CronEvery,
        CronRange,
        CronStep,
        CronValues,
        Month,
        Weekday,
    )
    from horsies.worker.config import WorkerConfig
    from horsies.workflow.build.shape import slugify
    from horsies.workflow.definition import WorkflowDefinition
    from horsies.workflow.nodes.context import WorkflowContext, WorkflowMeta
    from horsies.workflow.nodes.factory import NodeFactory, from_node
    from horsies.workflow.nodes.nodes import (
        AnyNode,
        MapNode,
        NodeKey,
        OnError,
        SignalNode,
        SleepNode,
        SubWorkflowNode,
        SuccessCase,
        SuccessPolicy,
        TaskNode,
    )
    from horsies.workflow.run.control import (
        pause_workflow,
        pause_workflow_sync,
        resume_workflow,
        resume_workflow_sync,
    )
    from horsies.workflow.run.handle import WorkflowHandle
    from horsies.workflow.run.info import (
        HandleErrorCode,
        HandleOperationError,
        HandleResult,
        SignalDelivery,
        WorkflowInfo,
        WorkflowStartError,
        WorkflowStartErrorCode,
        WorkflowStartResult,
        WorkflowTaskInfo,
    )
    from horsies.workflow.run.start import start_workflow, start_workflow_async
    from horsies.workflow.run.start_many import start_many, start_many_async
    from horsies.workflow.spec import WorkflowSpec, WorkflowTerminalResults

__all__ = [
    # the application
    "Horsies",
    "get_current_app",
    "ChildProcessStartHook",
    # tasks and their handles
    "TaskFunction",
    "TaskSendOptions",
    "TaskCall",
    "TaskHandle",
    "TaskInfo",
    "TaskAttemptInfo",
    "TaskProgress",
    "TaskCancelled",
    "TaskRetried",
    "TaskActionError",
    "TaskActionErrorCode",
    "TaskFailed",
    "ResultUnavailable",
    "ResultTimeout",
    "TaskWatchFailed",
    # inside a task
    "current_batch",
    "current_task",
    "CurrentTask",
    "NoCurrentTaskError",
    "RetryLater",
    "TaskStopped",
    "TaskTransaction",
    "AsyncTaskTransaction",
    "INJECTED",
    "TransactionMisuse",
    # configuration
    "AppConfig",
    "PostgresConfig",
    "QueueMode",
    "CustomQueueConfig",
    "RecoveryConfig",
    "WorkerResilienceConfig",
    "LogCapture",
    "FernetCodec",
    "PayloadCodec",
    "PayloadStore",
    "TableStore",
    "S3Store",
    "PayloadConfig",
    "TracingConfig",
    "Webhook",
    "WorkerConfig",
    "PayloadPolicy",
    "RetryPolicy",
    "ExceptionMapper",
    # schedules
    "ScheduleConfig",
    "TaskSchedule",
    "WorkflowSchedule",
    "SchedulePattern",
    "IntervalSchedule",
    "HourlySchedule",
    "DailySchedule",
    "WeeklySchedule",
    "MonthlySchedule",
    "CronSchedule",
    "DaySelector",
    "EveryDay",
    "ByMonthDay",
    "ByWeekday",
    "EitherDay",
    "BothDays",
    "CronEvery",
    "CronStep",
    "CronValues",
    "CronRange",
    "CronEnumValues",
    "CronEnumRange",
    "CronEnumStep",
    "Weekday",
    "Month",
    "calculate_next_run",
    "ScheduleState",
    "ScheduleRun",
    # outcomes
    "TaskResult",
    "TaskError",
    "SubWorkflowError",
    "OperationalErrorCode",
    "ContractCode",
    "RetrievalCode",
    "OutcomeCode",
    "BuiltInTaskCode",
    "BUILTIN_CODE_REGISTRY",
    "TaskStatus",
    "TaskAttemptOutcome",
    "TASK_TERMINAL_STATES",
    # sending
    "TaskSendResult",
    "TaskSendError",
    "TaskSendErrorCode",
    "TaskSendFailed",
    "TaskSendPayload",
    "Batch",
    "Debounce",
    "PerKey",
    "Rate",
    "OutgoingTask",
    "TaskOptions",
    # workflows
    "WorkflowSpec",
    "WorkflowDefinition",
    "WorkflowTerminalResults",
    "TaskNode",
    "SubWorkflowNode",
    "MapNode",
    "SleepNode",
    "SignalNode",
    "AnyNode",
    "NodeKey",
    "NodeFactory",
    "from_node",
    "slugify",
    "OnError",
    "SuccessPolicy",
    "SuccessCase",
    "WorkflowContext",
    "WorkflowMeta",
    "SubWorkflowSummary",
    "WorkflowContextMissingIdError",
    "WorkflowStatus",
    "WorkflowTaskStatus",
    "WORKFLOW_TERMINAL_STATES",
    "WORKFLOW_TASK_TERMINAL_STATES",
    # workflow runs
    "start_workflow",
    "start_workflow_async",
    "start_many",
    "start_many_async",
    "WorkflowStartResult",
    "WorkflowStartError",
    "WorkflowStartErrorCode",
    "WorkflowHandle",
    "WorkflowInfo",
    "WorkflowTaskInfo",
    "HandleResult",
    "HandleOperationError",
    "HandleErrorCode",
    "SignalDelivery",
    "pause_workflow",
    "pause_workflow_sync",
    "resume_workflow",
    "resume_workflow_sync",
    # durable functions
    "Durable",
    "DurableSteps",
    "AsyncDurable",
    "AsyncDurableSteps",
    "DurableHandle",
    "DurableInfo",
    "DurableStep",
    "Child",
    "StepCall",
    "StepFailed",
    "DurableMisuse",
    # the broker
    "PostgresBroker",
    "BrokerResult",
    "BrokerOperationError",
    "BrokerErrorCode",
    # health and operations
    "DatabasePing",
    "WorkerPong",
    "WorkerStateSnapshot",
    "KeyState",
    "QueueState",
    "StaleTask",
    "WorkerStats",
    "ExpiredTask",
    # results as values
    "Result",
    "Ok",
    "Err",
    "UnwrapError",
    "is_ok",
    "is_err",
    # mistakes
    "HorsiesError",
    "ConfigurationError",
    "TaskDefinitionError",
    "RegistryError",
    "WorkflowValidationError",
    "MultipleValidationErrors",
    "ValidationReport",
    "ErrorCode",
    "SourceLocation",
    "__version__",
]

# Each name is imported from its module on first use, so that a program that only sends tasks does
# not load schedules and the monitor. The names match the block above, which type checkers read.
_NAMES_BY_MODULE = {
    "app": "ChildProcessStartHook Horsies get_current_app",
    "encryption": "PayloadCodec",
    "payload_store": "PayloadStore TableStore",
    "s3_store": "S3Store",
    "codec.fernet": "FernetCodec",
    "config.app": (
        "AppConfig CustomQueueConfig LogCapture PayloadConfig PayloadPolicy PerKey QueueMode Rate "
        "RecoveryConfig WorkerResilienceConfig"
    ),
    "config.postgres": "PostgresConfig",
    "config.schedules": "ScheduleConfig TaskSchedule WorkflowSchedule",
    "config.tracing": "TracingConfig",
    "config.webhooks": "Webhook",
    "db.statements.keys": "KeyState",
    "db.statements.monitor": "ExpiredTask QueueState StaleTask WorkerStateSnapshot WorkerStats",
    "db.statements.schedules": "ScheduleRun ScheduleState",
    "db.statements.tasks": "TaskAttemptInfo TaskProgress",
    "durable.async_context": "AsyncDurable AsyncDurableSteps",
    "durable.calls": "Child StepCall",
    "durable.context": "Durable DurableSteps",
    "durable.handle": "DurableHandle DurableInfo DurableStep",
    "error_codes": (
        "BUILTIN_CODE_REGISTRY BuiltInTaskCode ContractCode OperationalErrorCode OutcomeCode "
        "RetrievalCode"
    ),
    "errors": (
        "ConfigurationError DurableMisuse ErrorCode HorsiesError MultipleValidationErrors "
        "NoCurrentTaskError RegistryError ResultTimeout ResultUnavailable RetryLater SourceLocation "
        "StepFailed "
        "TaskDefinitionError TaskFailed TaskStopped TaskWatchFailed TransactionMisuse ValidationReport "
        "WorkflowContextMissingIdError WorkflowValidationError"
    ),
    "monitor.actions": "TaskRetried",
    "monitor.health": "DatabasePing WorkerPong",
    "result": "Err Ok Result UnwrapError is_err is_ok",
    "retry": "ExceptionMapper RetryPolicy",
    "states": (
        "TASK_TERMINAL_STATES WORKFLOW_TASK_TERMINAL_STATES WORKFLOW_TERMINAL_STATES "
        "TaskAttemptOutcome TaskStatus WorkflowStatus WorkflowTaskStatus"
    ),
    "task": "TaskFunction TaskSendFailed TaskSendOptions",
    "task_result": "SubWorkflowError SubWorkflowSummary TaskError TaskResult",
    "tasks.broker": "BrokerErrorCode BrokerOperationError BrokerResult PostgresBroker",
    "tasks.handle": "TaskActionError TaskActionErrorCode TaskCancelled TaskHandle TaskInfo",
    "tasks.batch": "Batch",
    "tasks.options": "Debounce OutgoingTask TaskOptions",
    "tasks.request": "TaskSendError TaskSendErrorCode TaskSendPayload TaskSendResult",
    "tasks.send": "TaskCall",
    "tasks.transaction": "INJECTED AsyncTaskTransaction TaskTransaction",
    "timetable.next_run": "calculate_next_run",
    "timetable.patterns": (
        "BothDays ByMonthDay ByWeekday CronSchedule DailySchedule DaySelector EitherDay EveryDay "
        "HourlySchedule IntervalSchedule MonthlySchedule SchedulePattern WeeklySchedule"
    ),
    "timetable.terms": (
        "CronEnumRange CronEnumStep CronEnumValues CronEvery CronRange CronStep CronValues Month "
        "Weekday"
    ),
    "workflow.build.shape": "slugify",
    "workflow.definition": "WorkflowDefinition",
    "workflow.nodes.context": "WorkflowContext WorkflowMeta",
    "workflow.nodes.factory": "NodeFactory from_node",
    "workflow.nodes.nodes": (
        "AnyNode MapNode NodeKey OnError SignalNode SleepNode SubWorkflowNode SuccessCase "
        "SuccessPolicy TaskNode"
    ),
    "workflow.run.control": (
        "pause_workflow pause_workflow_sync resume_workflow resume_workflow_sync"
    ),
    "workflow.run.handle": "WorkflowHandle",
    "workflow.run.info": (
        "HandleErrorCode HandleOperationError HandleResult SignalDelivery WorkflowInfo "
        "WorkflowStartError WorkflowStartErrorCode WorkflowStartResult WorkflowTaskInfo"
    ),
    "workflow.run.start": "start_workflow start_workflow_async",
    "workflow.run.start_many": "start_many start_many_async",
    "workflow.spec": "WorkflowSpec WorkflowTerminalResults",
    "worker.config": "WorkerConfig",
}
_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


if not TYPE_CHECKING:  # For a type checker, a name missing from the block above must not exist.

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
