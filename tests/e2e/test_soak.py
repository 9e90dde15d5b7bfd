"""A minute of the soak run, with a fixed seed; `make soak` runs it for longer, with new seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import soak

SECONDS = 60.0
SEED = 3


@pytest.mark.slow
@pytest.mark.direct("the soak run has servers of its own")
@pytest.mark.timeout(400)
def test_a_minute_of_faults_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    report = soak(SECONDS, SEED, tmp_path)
    summary = "\n".join(report.lines())
    print(summary)
    assert not report.has_failed, summary
