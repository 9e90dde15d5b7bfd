"""A short soak run, with a fixed seed; `make soak` runs it for longer, with new seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.plan import Kind, make_plan
from tests.soak.run import soak

# The plan of this seed has every kind of fault by then, some of them too long for a worker to stay.
SECONDS = 38.0
SEED = 267


@pytest.mark.slow
@pytest.mark.direct("the soak run has servers of its own")
@pytest.mark.timeout(400)
def test_every_kind_of_fault_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    plan = make_plan(SEED, SECONDS)
    assert {fault.kind for fault in plan} == set(Kind)
    assert any(fault.is_long for fault in plan)
    report = soak(SECONDS, SEED, tmp_path)
    summary = "\n".join(report.lines())
    print(summary)
    assert not report.has_failed, summary
