"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from horsies.retry import resolve_exception_code

# Retries

CHARGE = """
from enum import StrEnum

from horsies import Horsies, RetryPolicy, TaskError, TaskResult

app = Horsies("postgresql://nobody@127.0.0.1:1/nothing")
BANK_AWAY = "THE_BANK_IS_AWAY"


class Code(StrEnum):
    SLOW = "BANK_SLOW"


def bank_is_busy() -> TaskError:
    return TaskError(error_code="BANK_BUSY", message="later")


@app.task(
    "charge",
    exception_mapper={ConnectionError: "GATEWAY_DOWN"},
    default_unhandled_error_code="CHARGE_FAILED",
    retry_policy=RetryPolicy.exponential(1, max_retries=2, auto_retry_for=[
        *("GATEWAY_DOWN", "CHARGE_FAILED", "WORKER_CRASHED", "TASK_TIMEOUT"),
        *("BANK_BUSY", BANK_AWAY, Code.SLOW),
        *("GATEWY_DOWN", "NEVER_MENTIONED", "TASK_CANCELLED"),
    ]),
)
def charge() -> TaskResult[int, TaskError]:
    return TaskResult(err=bank_is_busy())
"""


def test_check_warns_of_codes_that_nothing_produces(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CHARGE)
    command = [sys.executable, "-m", "horsies", "check", "shop:app"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, "ok: all validations passed" in checked.stdout) == (0, True)
    warnings = [line.partition("auto_retry_for lists ")[2] for line in checked.stderr.splitlines()]
    unproduced = "but no exception mapper, default code or function produces it"
    assert warnings == [
        f"GATEWY_DOWN, {unproduced}; did you mean GATEWAY_DOWN?",
        f"NEVER_MENTIONED, {unproduced}; correct the code or remove it",
        "TASK_CANCELLED, a built-in code that no failed attempt has; remove it",
    ]
    assert f"In task 'charge' ({tmp_path / 'shop.py'}:" in checked.stderr


class Reset(ConnectionResetError):
    pass


@pytest.mark.parametrize(
    ("task_mapper", "app_mapper", "code"),
    [
        ({ConnectionError: "AWAY"}, {}, "AWAY"),
        ({}, {OSError: "SYSTEM"}, "SYSTEM"),
        ({OSError: "SYSTEM", ConnectionError: "AWAY"}, {}, "AWAY"),
        ({ConnectionError: "AWAY", OSError: "SYSTEM", Reset: "RESET"}, {}, "RESET"),
        ({OSError: "SYSTEM"}, {Reset: "RESET"}, "SYSTEM"),
        ({TimeoutError: "SLOW"}, {BaseException: "ANY"}, "ANY"),
        ({TimeoutError: "SLOW"}, {}, "DEFAULT"),
    ],
)
def test_a_mapped_exception_stands_for_its_subclasses(
    task_mapper: dict[type[BaseException], str],
    app_mapper: dict[type[BaseException], str],
    code: str,
) -> None:
    assert resolve_exception_code(Reset(), task_mapper, app_mapper, "DEFAULT", None) == code
