"""Compare Horsies with other task queues: ``python -m benchmarks.peers``, or ``make bench-peers``.

Runs every workload for all peers alternately, for several rounds, and prints medians with their range,
ratios to Horsies, versions, settings, and missing features of the peers. The cell of a failed workload
shows the reason. Every result is stored immediately; a stopped run is continued with --resume. All
processes, servers and databases are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import Machine, MachineBusyError
from benchmarks.peers import table
from benchmarks.peers.adapter import PEERS
from benchmarks.peers.bench import QUICK, Bench, PeerFailed, Sizes
from benchmarks.peers.results import OtherSizesError, Result, Results
from benchmarks.peers.servers import Servers, all_servers
from benchmarks.peers.table import Measured
from benchmarks.peers.workloads import WORKLOADS, in_turns, once

SERVERS_OF = {"celery": "Redis", "dramatiq": "Redis", "rq": "Redis", "arq": "Redis"}
# The time of the check for other processes before each of hundreds of measurements.
QUIET_SECONDS = 0.5


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the requested Markdown files."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sizes = QUICK if options.quick else Sizes()
    sizes = replace(
        sizes, seconds=options.seconds or sizes.seconds, tasks=options.tasks or sizes.tasks
    )
    results = Results(options.results, sizes)
    try:
        results.resume() if options.resume else results.begin()
    except OtherSizesError as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory(prefix="horsies-peers-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        place.chmod(0o755)
        with all_servers(place, _servers_wanted(options.peers)) as servers:
            run = Run(servers, place, results, _machine(options.busy or options.quick))
            try:
                run.describe(options.peers)
                run.measure(options.workloads, options.rounds)
            except KeyboardInterrupt:
                run.ended_early = "interrupted"
            except MachineBusyError as error:
                run.ended_early = str(error)
            about = _about(servers, options.rounds, results)
    measured = run.measured(options.rounds)
    _report(measured, about, run.left_out)
    if run.ended_early:
        print(f"\nThe tables are incomplete, and no page is written: {run.ended_early}")
        print("Continue with RESUME=1.")
        return 1
    _write(options.markdown, table.document(measured, about, run.left_out))
    return 0 if measured else 1


def _interrupt(*_: object) -> None:
    # A second signal must not interrupt the clean-up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _machine(accepts_busy: bool) -> Machine:
    return Machine(accepts_busy=accepts_busy, sleep=lambda _: time.sleep(QUIET_SECONDS))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "peers", nargs="*", default=list(PEERS), metavar="PEER", help=", ".join(PEERS)
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small counts: a smoke test")
    parser.add_argument("--busy", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--seconds", type=float, help="longest drain")
    parser.add_argument("--tasks", type=int, help="tasks to drain")
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), metavar="NAME"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what an earlier run measured, and do the rest"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path(sys.prefix, "results.jsonl"),
        metavar="FILE",
        help="where results are stored (%(default)s)",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the tables",
    )
    return parser


class Run:
    """The state of one run: the peers, their results, and peers that were left out."""

    def __init__(self, servers: Servers, place: Path, results: Results, machine: Machine) -> None:
        self._servers, self._place, self._results, self._machine = servers, place, results, machine
        self._benches: dict[str, Bench] = {}
        self.left_out: dict[str, str] = {}
        self.ended_early = ""

    def describe(self, peers: Sequence[str]) -> None:
        """Load the facts of each peer; leave out a peer that cannot be imported or lacks its server."""
        for peer in peers:
            bench = Bench(peer, self._servers, self._place, self._results.sizes)
            try:
                facts = bench.step(bench.environment(self._servers.postgres), "facts")
            except PeerFailed as failure:
                self.left_out[peer] = str(failure)
                continue
            missing = [self._servers.missing.get(server) for server in facts["servers"]]
            if reason := next(filter(None, missing), None):
                self.left_out[peer] = reason
            else:
                self._benches[peer] = replace(bench, facts=facts)
        for peer, reason in self.left_out.items():
            print(f"{peer:16}left out: {reason}", flush=True)

    def measure(self, workloads: Sequence[str], rounds: int) -> None:
        """Run the workloads, each for all peers in turn, round by round."""
        for round_number in range(rounds):
            for workload in workloads:
                if once(workload) and round_number:
                    continue
                for peer in in_turns(list(self._benches), round_number):
                    if (round_number, peer, workload) not in self._results:
                        self._one(round_number, peer, workload)

    def _one(self, round_number: int, peer: str, workload: str) -> None:
        self._machine.was_busy = False
        self._machine.wait_until_idle()
        figures: dict[str, float | str] = {}
        failed, started = "", time.monotonic()
        try:
            for name, figure in WORKLOADS[workload](self._benches[peer]):
                figures[name] = figure
        except PeerFailed as failure:
            failed = str(failure)
        except Exception as error:  # For any error of a peer, continue with the other peers.
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        seconds = time.monotonic() - started
        shown = [_shown(name, figure) for name, figure in figures.items()]
        shown += [f"failed: {failed}"] if failed else []
        print(
            f"{round_number + 1} {peer:16}{workload:10}{seconds:6.1f} s  {', '.join(shown) or 'not offered'}",
            flush=True,
        )
        self._results.add(
            Result(round_number, peer, workload, figures, failed, self._machine.was_busy)
        )

    def measured(self, rounds: int) -> dict[str, Measured]:
        """Collect the results of this many rounds by peer."""
        found = {peer: Measured(bench.facts) for peer, bench in self._benches.items()}
        for result in self._results:
            if result.peer in found and result.round_number < rounds:
                found[result.peer].add(result.workload, result.figures, result.failed)
        return found


def _shown(name: str, figure: float | str) -> str:
    return f"{name} {figure:,.2f}" if isinstance(figure, float) else f"{name} {figure}"


def _servers_wanted(peers: Sequence[str]) -> set[str]:
    redis = {"Redis"} if any(peer.partition("-")[0] in SERVERS_OF for peer in peers) else set[str]()
    return redis | ({"RabbitMQ"} if "celery-rabbitmq" in peers else set())


def _about(servers: Servers, rounds: int, results: Results) -> str:
    place = f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"
    busy = " Other processes used the machine meanwhile: do not trust these figures."
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {place}, {', '.join(servers.described)}; median (range) of "
        f"{rounds} alternating round{'s' if rounds > 1 else ''}, all servers on the same machine."
        f"{busy if any(result.was_busy for result in results) else ''}"
    )


def _report(measured: dict[str, Measured], about: str, left_out: dict[str, str]) -> None:
    print(f"\n{about}\n")
    print(table.plain(*table.figure_rows(measured, list(table.COLUMNS))))
    print("\nratios to Horsies\n")
    print(table.plain(*table.ratio_rows(measured)))
    print("\nwhat the figures do not show\n")
    print(table.plain(*table.fact_rows(measured)))
    print("\nsettings\n")
    print(table.plain(*table.setting_rows(measured)))
    for peer, reason in left_out.items():
        print(f"\nleft out: {peer}: {reason}")


def _write(pages: Sequence[Path], regions: dict[str, str]) -> None:
    for page in pages:
        text = page.read_text("utf-8") if page.exists() else ""
        page.write_text(table.with_regions(text, regions), "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
