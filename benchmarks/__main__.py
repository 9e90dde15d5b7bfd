"""Run the benchmarks: ``python -m benchmarks [names]``, all of them by default.

Each measures a ratio inside one run, so that the machine does not matter. Uses the database named by
HORSIES_TEST_DATABASE_URL, or a private server of its own. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psycopg

from benchmarks import async_children, history, producer, progress, tally, viewers, worker, workflow
from horsies.db.embedded import start_or_join
from horsies.db.migrate import apply_migrations

ALL: dict[str, Callable[[str], bool]] = {
    **producer.BENCHMARKS,
    **worker.BENCHMARKS,
    **async_children.BENCHMARKS,
    **progress.BENCHMARKS,
    **tally.BENCHMARKS,
    **viewers.BENCHMARKS,
    **history.BENCHMARKS,
    **workflow.BENCHMARKS,
}


@contextmanager
def server() -> Iterator[str]:
    """Lend the URL of a database to measure on."""
    if named := os.environ.get("HORSIES_TEST_DATABASE_URL"):
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="horsies-bench-", ignore_cleanup_errors=True) as place:
        Path(place).chmod(0o755)
        yield start_or_join(f"embedded://{place}/postgres", keep_data=False)


def main(names: Sequence[str]) -> int:
    """Run the named benchmarks and say which of them missed their target."""
    unknown = [name for name in names if name not in ALL]
    if unknown:
        print(f"There is no benchmark {', '.join(unknown)}; choose from {', '.join(ALL)}.")
        return 2
    with server() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            apply_migrations(connection)
        missed = [name for name in names or ALL if not ALL[name](url)]
    print(f"\ntargets missed: {', '.join(missed)}" if missed else "\nall targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
