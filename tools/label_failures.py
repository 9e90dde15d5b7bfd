"""Run each failed test of the last pytest run again, alone, and label it. `python -m
tools.label_failures` prints FLAKY for a test that passes alone and FAILS for a test that fails again.
The label is only a hint; the run stays failed, so the exit status is always 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LAST_FAILED = REPOSITORY / ".pytest_cache" / "v" / "cache" / "lastfailed"
# With more failures than this, a common cause is likely, and repeating them only takes time.
REPEATED_MAX = 15


def last_failed() -> list[str]:
    return sorted(json.loads(LAST_FAILED.read_text("utf-8"))) if LAST_FAILED.exists() else []


def passes_alone(test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", test]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode == 0


def label(test: str) -> str:
    if passes_alone(test):
        return f"FLAKY: {test} failed, then passed alone"
    return f"FAILS: {test} failed, and failed again alone"


def main() -> int:
    failed = last_failed()
    labels = [label(test) for test in failed[:REPEATED_MAX]]
    labels += [f"FAILED: {test}, not repeated" for test in failed[REPEATED_MAX:]]
    print("\n".join(labels or ["no failed test on record"]), flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
