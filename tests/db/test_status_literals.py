"""Status words in SQL files: each one exists in states.py, and each list of them is a known group."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from importlib.resources import files

import pytest

from horsies.error_codes import ContractCode, OperationalErrorCode, OutcomeCode, RetrievalCode
from horsies.findings import CATALOGUE
from horsies.states import (
    TASK_TERMINAL_STATES,
    WORKFLOW_TASK_TERMINAL_STATES,
    WORKFLOW_TERMINAL_STATES,
    TaskAttemptOutcome,
    TaskStatus,
    WorkflowStatus,
    WorkflowTaskStatus,
)

FOLDERS = ("migrations", "functions", "statements")
SQL = {
    f"{folder}/{file.name}": file.read_text("utf-8")
    for folder in FOLDERS
    for file in sorted(files("horsies.db").joinpath(folder).iterdir(), key=lambda file: file.name)
    if file.name.endswith(".sql")
}

STATUSES = {*TaskStatus, *WorkflowStatus, *WorkflowTaskStatus, *TaskAttemptOutcome}
ERROR_CODES = {*OperationalErrorCode, *ContractCode, *RetrievalCode, *OutcomeCode}
# The answers of a control function that are not statuses.
ANSWERS = {
    *("NO_FAILED_NODE", "PARENT_ENDED", "KEY_TAKEN", "REDACTED", "UNKNOWN_SIGNAL"),
    *("NOT_HELD", "STEP_NOT_FOUND", "CANCELLING"),
}
WORDS_OF_POSTGRESQL = {"UTC", "USAGE", "CREATE", "SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE"}

OPEN_TASKS = set(TaskStatus) - TASK_TERMINAL_STATES
OPEN_RUNS = set(WorkflowStatus) - WORKFLOW_TERMINAL_STATES

GROUPS: dict[str, AbstractSet[str]] = {
    "all of a task": set(TaskStatus),
    "all of a run": set(WorkflowStatus),
    "all of a node": set(WorkflowTaskStatus),
    "all of an attempt": set(TaskAttemptOutcome),
    "tasks in flight": {TaskStatus.CLAIMED, TaskStatus.RUNNING},
    "open tasks": OPEN_TASKS,
    "unstarted tasks": {TaskStatus.PENDING, TaskStatus.CLAIMED},
    "terminal tasks and runs": TASK_TERMINAL_STATES,
    "tasks without success": TASK_TERMINAL_STATES - {TaskStatus.COMPLETED},
    "held tasks, none of them claimed": OPEN_TASKS - {TaskStatus.CLAIMED},
    "open runs": OPEN_RUNS,
    "runs that have begun": OPEN_RUNS - {WorkflowStatus.PENDING},
    "runs of which waiters are notified": WORKFLOW_TERMINAL_STATES | {WorkflowStatus.PAUSED},
    "runs that can be retried": {
        WorkflowStatus.FAILED,
        WorkflowStatus.PAUSED,
        WorkflowStatus.RUNNING,
    },
    "runs that resume from failures": {WorkflowStatus.FAILED, WorkflowStatus.PAUSED},
    "terminal nodes": WORKFLOW_TASK_TERMINAL_STATES,
    "open nodes": set(WorkflowTaskStatus) - WORKFLOW_TASK_TERMINAL_STATES,
    "waiting nodes": {WorkflowTaskStatus.PENDING, WorkflowTaskStatus.READY},
    "nodes with a task's result": WORKFLOW_TASK_TERMINAL_STATES - {WorkflowTaskStatus.SKIPPED},
}


def lists_of_words(text: str) -> list[frozenset[str]]:
    found = re.findall(r"\bIN \(((?:'[A-Z_]+'(?:,\s*)?)+)\)", text)
    return [frozenset(re.findall(r"[A-Z_]+", words)) for words in found]


def test_terminal_tasks_and_runs_are_the_same_words() -> None:
    assert {str(one) for one in TASK_TERMINAL_STATES} == {
        str(one) for one in WORKFLOW_TERMINAL_STATES
    }


@pytest.mark.parametrize("name", SQL)
def test_every_upper_case_literal_is_a_status_a_code_or_an_answer(name: str) -> None:
    words = set(re.findall(r"'([A-Z][A-Z_]+)'", SQL[name]))
    known = {str(word) for word in STATUSES | ERROR_CODES} | CATALOGUE.keys()
    assert words - known <= ANSWERS | WORDS_OF_POSTGRESQL


@pytest.mark.parametrize("name", SQL)
def test_every_list_of_statuses_is_a_group_of_states(name: str) -> None:
    known = {frozenset(map(str, group)) for group in GROUPS.values()}
    assert [words for words in lists_of_words(SQL[name]) if words not in known] == []


def test_every_group_is_used() -> None:
    used = {words for text in SQL.values() for words in lists_of_words(text)}
    assert [name for name, group in GROUPS.items() if frozenset(map(str, group)) not in used] == []


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        ("horsies_task_status", set(TaskStatus)),
        ("horsies_attempt_outcome", set(TaskAttemptOutcome)),
        ("horsies_run_status", set(WorkflowStatus)),
        ("horsies_node_status", set(WorkflowTaskStatus)),
    ],
)
def test_a_domain_allows_exactly_the_words_of_its_enumeration(domain: str, words: set[str]) -> None:
    match = re.search(rf"CREATE DOMAIN {domain} .*?;", SQL["migrations/0001_schema.sql"], re.DOTALL)
    assert match is not None
    assert lists_of_words(match[0]) == [frozenset(map(str, words))]
