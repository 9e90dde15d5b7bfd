"""Commands on a hot standby: those that read work, and those that change something say why they cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from horsies.cli.main import command_line
from tests.support.replicated_server import ReplicatedServer, sent_to_standby

READ_ONLY = "PostgreSQL takes only reads here, as a standby does"


@pytest.fixture(scope="module")
def replica() -> Iterator[tuple[str, str]]:
    """The URL of a standby, and the id of a waiting task that it has received."""
    with ReplicatedServer() as servers:
        task_id = sent_to_standby(servers)
        yield servers.standby.url, task_id


def run(replica: tuple[str, str], *words: str) -> tuple[int, str]:
    url, task_id = replica
    words = tuple(task_id if word == "ID" else word for word in words)
    done = CliRunner().invoke(command_line(), [*words, "--database-url", url])
    # The program prints an error that ends a command; the runner only keeps it.
    return done.exit_code, " ".join(f"{done.output} {done.exception or ''}".split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "default - 1 0"),
        (("workers",), "No worker is running."),
        (("tasks",), "PENDING"),
        (("show", "ID"), "add on default"),
        (("logs", "ID"), "Nothing is"),
        (("explain", "ID"), "QUEUE_UNSERVED"),
        (("failures",), "No attempt has failed."),
        (("workflows",), "No workflow matches."),
        (("history",), "No change is on record."),
        (("queues",), "default"),
        (("keys", "list", "default"), ""),
        (("schedules",), "No schedule is on record."),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_that_reads_works_on_a_standby(
    replica: tuple[str, str], words: tuple[str, ...], said: str
) -> None:
    code, output = run(replica, *words)
    assert (code, said in output) == (0, True), output


def test_the_doctor_checks_everything_but_notifications_on_a_standby(
    replica: tuple[str, str],
) -> None:
    code, output = run(replica, "doctor")
    assert code == 3
    assert "red standby: The address leads to a standby" in output
    assert "unknown notifications: Not checked" in output
    assert "1 unknown." in output


@pytest.mark.parametrize(
    "words",
    [("cancel", "ID"), ("queues", "pause", "default")],
    ids=lambda words: words[0],
)
def test_a_command_that_changes_something_says_that_it_met_a_standby(
    replica: tuple[str, str], words: tuple[str, ...]
) -> None:
    code, output = run(replica, *words)
    assert (code, READ_ONLY in output) == (1, True), output
