"""The faults of a task's transaction: each has tests, and the two tables of them agree."""

from __future__ import annotations

import re

from tests.support.doc_pages import REPOSITORY, page, rows, section

HEADING = "The faults of a task's transaction"


def test_every_fault_of_a_transaction_has_tests() -> None:
    faults = [cells[0] for cells in rows(section(page("exactly-once.md"), "Fault by fault"))]
    tested = [cells[0] for cells in rows(section(page("internals/liveness.md"), HEADING))]
    assert tested == faults


def test_the_tests_of_the_faults_exist() -> None:
    texts = [path.read_text("utf-8") for path in (REPOSITORY / "tests" / "e2e").rglob("test_*.py")]
    known = set(re.findall(r"^(?:async )?def (test_\w+)\(", "\n".join(texts), re.MULTILINE))
    table = [*rows(section(page("internals/liveness.md"), HEADING))]
    named = {name for _, tests in table for name in re.findall(r"`(\w+)`", tests)}
    assert named <= known
    assert all("`test_" in tests for _, tests in table)
