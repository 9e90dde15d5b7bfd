"""Run the benchmarks. Each benchmark measures a ratio within one run, so that the machine does not
matter, and every round waits for an idle machine. The benchmarks use the database named by
HORSIES_TEST_DATABASE_URL, or a private server.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psycopg

from benchmarks import (
    async_children,
    burst,
    capacity,
    durable,
    encryption,
    growth,
    history,
    keys,
    logs,
    producer,
    progress,
    queues,
    sessions,
    tally,
    tracing,
    transactions,
    unused,
    viewers,
    windows_bounds,
    worker,
    workers,
    workflow,
)
from benchmarks.against import COMPARED, compare
from benchmarks.machine import MACHINE, MachineBusyError
from benchmarks.server import server
from horsies.db.migrate import apply_migrations

# The number of connections that the largest benchmark needs.
CONNECTIONS = max(1_200, *(size + 100 for size in sessions.SIZES))

ALL: dict[str, Callable[[str], bool]] = {
    **producer.BENCHMARKS,
    **worker.BENCHMARKS,
    **async_children.BENCHMARKS,
    **burst.BENCHMARKS,
    **windows_bounds.BENCHMARKS,
    **queues.BENCHMARKS,
    **keys.BENCHMARKS,
    **progress.BENCHMARKS,
    **tally.BENCHMARKS,
    **tracing.BENCHMARKS,
    **logs.BENCHMARKS,
    **encryption.BENCHMARKS,
    **unused.BENCHMARKS,
    **transactions.BENCHMARKS,
    **durable.BENCHMARKS,
    **viewers.BENCHMARKS,
    **history.BENCHMARKS,
    **growth.BENCHMARKS,
    **workflow.BENCHMARKS,
    **workers.BENCHMARKS,
    **sessions.BENCHMARKS,
    **capacity.BENCHMARKS,
}


def main(arguments: Sequence[str]) -> int:
    """Run the named benchmarks; return 1 for a missed target, 2 for bad arguments, 3 on a busy machine."""
    chosen = _parser().parse_args(arguments)
    known = ALL if chosen.against is None else COMPARED
    if unknown := [name for name in chosen.names if name not in known]:
        print(f"There is no benchmark {', '.join(unknown)}; choose from {', '.join(known)}.")
        return 2
    if chosen.at_least is not None and chosen.against is None:
        print("--at-least needs --against.")
        return 2
    MACHINE.accepts_busy = chosen.busy
    names = chosen.names or list(known)
    try:
        with server(CONNECTIONS) as url:
            if chosen.against is None:
                return _measure(url, names)
            is_met = compare(url, chosen.against, names, chosen.rounds, chosen.at_least)
            return 0 if is_met else 1
    except FileNotFoundError as error:
        print(error)
        return 2
    except MachineBusyError as error:
        print(error)
        return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the benchmarks, by default all")
    parser.add_argument(
        "--busy", action="store_true", help="measure on a busy machine too, and mark the figures"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="compare with another checkout, which needs a .venv of its own, in alternating rounds",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="the rounds of --against, by default 5"
    )
    parser.add_argument(
        "--at-least",
        type=float,
        metavar="SHARE",
        help="with --against: exit with 1 if this checkout's median speed is below this share of the other's",
    )
    return parser


def _measure(url: str, names: Sequence[str]) -> int:
    with psycopg.connect(url, autocommit=True) as connection:
        apply_migrations(connection)
    missed = [name for name in names if not ALL[name](url)]
    print(f"\ntargets missed: {', '.join(missed)}" if missed else "\nall targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
