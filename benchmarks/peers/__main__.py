"""Measure Horsies beside other task queues: ``python -m benchmarks.peers``, or ``make bench-peers``.

Runs every workload for every peer in turns, for several rounds, and prints medians with their range,
ratios to Horsies, versions, settings, and the things that a peer does not do. A peer that fails is
left out with its reason. Ctrl-C prints what has been measured. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine, MachineBusyError
from benchmarks.peers import table
from benchmarks.peers.adapter import PEERS
from benchmarks.peers.servers import Servers, all_servers
from benchmarks.peers.table import Measured
from benchmarks.peers.workloads import QUICK, WORKLOADS, Bench, PeerFailed, Sizes, in_turns, once

SERVERS_OF = {"celery": "Redis", "dramatiq": "Redis", "rq": "Redis", "arq": "Redis"}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write the Markdown files that were asked for."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sizes = QUICK if options.quick else Sizes()
    sizes = replace(
        sizes, seconds=options.seconds or sizes.seconds, tasks=options.tasks or sizes.tasks
    )
    with tempfile.TemporaryDirectory(prefix="horsies-peers-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        place.chmod(0o755)
        with all_servers(place, _servers_wanted(options.peers)) as servers:
            run = Run(servers, place, sizes, Machine(accepts_busy=options.busy or options.quick))
            try:
                run.describe(options.peers)
                run.measure(options.workloads, options.rounds)
            except KeyboardInterrupt:
                run.ended_early = "interrupted"
            except MachineBusyError as error:
                run.ended_early = str(error)
            about = _about(servers, options.rounds, run.machine)
    _report(run, about)
    if run.ended_early:
        print(f"\nThe tables are incomplete, and no page is written: {run.ended_early}")
        return 1
    regions = table.document(run.measured, about, run.failed)
    for path in options.markdown:
        text = path.read_text("utf-8") if path.exists() else ""
        path.write_text(table.with_regions(text, regions), "utf-8")
    return 0 if run.measured else 1


def _interrupt(*_: object) -> None:
    # A second signal must not interrupt the clean-up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


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
        "--markdown",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the tables",
    )
    return parser


class Run:
    """The state of one run: what was measured, and what failed."""

    def __init__(self, servers: Servers, place: Path, sizes: Sizes, machine: Machine) -> None:
        self._servers, self._place, self._sizes = servers, place, sizes
        self.machine = machine
        self.measured: dict[str, Measured] = {}
        self.failed: dict[str, str] = {}
        self.ended_early = ""

    def describe(self, peers: Sequence[str]) -> None:
        """Load the facts of each peer; one that cannot be imported or lacks its server is left out."""
        for peer in peers:
            self._attempt(peer, "facts", self._load)

    def _load(self, peer: str) -> None:
        bench = self._bench(peer)
        facts = bench.step(bench.environment(self._servers.postgres), "facts")
        for server in facts["servers"]:
            if server in self._servers.missing:
                raise PeerFailed(self._servers.missing[server])
        self.measured[peer] = Measured(facts)

    def measure(self, workloads: Sequence[str], rounds: int) -> None:
        """Run the workloads, each for all peers in turns, round after round."""
        for round_number in range(rounds):
            for workload in workloads:
                if once(workload) and round_number:
                    continue
                for peer in in_turns(list(self.measured), round_number):
                    self._attempt(peer, workload, partial(self._one, workload))

    def _one(self, workload: str, peer: str) -> None:
        found = self.measured[peer]
        self.machine.wait_until_idle()
        figures: Mapping[str, Any] = WORKLOADS[workload](self._bench(peer), found.facts)
        for name, figure in figures.items():
            if name == "crash":
                found.crash = figure
            else:
                found.figures.setdefault(name, []).append(figure)
        shown = ", ".join(_shown(name, figure) for name, figure in figures.items())
        print(f"{peer:16}{workload:12}{shown or 'not offered'}", flush=True)

    def _attempt(self, peer: str, workload: str, attempt: Callable[[str], None]) -> None:
        try:
            attempt(peer)
        except PeerFailed as failure:
            print(f"{peer:16}{workload:12}failed: {failure}", flush=True)
            self.failed[f"{peer}, {workload}"] = str(failure)

    def _bench(self, peer: str) -> Bench:
        return Bench(peer, self._servers, self._place, self._sizes)


def _shown(name: str, figure: float | str) -> str:
    return f"{name} {figure:,.2f}" if isinstance(figure, float) else f"{name} {figure}"


def _servers_wanted(peers: Sequence[str]) -> set[str]:
    redis = {"Redis"} if any(peer.partition("-")[0] in SERVERS_OF for peer in peers) else set[str]()
    return redis | ({"RabbitMQ"} if "celery-rabbitmq" in peers else set())


def _about(servers: Servers, rounds: int, machine: Machine) -> str:
    place = f"{os.cpu_count()} cores {platform.machine()}, Python {platform.python_version()}"
    busy = " Other processes used the machine meanwhile: do not trust these figures."
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {place}, {', '.join(servers.described)}; median (range) of "
        f"{rounds} alternating round{'s' if rounds > 1 else ''}, all servers on the same machine."
        f"{busy if machine.was_busy else ''}"
    )


def _report(run: Run, about: str) -> None:
    print(f"\n{about}\n")
    print(table.plain(*table.figure_rows(run.measured, list(table.COLUMNS))))
    print("\nratios to Horsies\n")
    print(table.plain(*table.ratio_rows(run.measured)))
    print("\nwhat the figures do not show\n")
    print(table.plain(*table.fact_rows(run.measured)))
    print("\nsettings\n")
    print(table.plain(*table.setting_rows(run.measured)))
    for step, reason in run.failed.items():
        print(f"\nfailed: {step}: {reason}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
