"""The workloads, the same for all peers. Each returns named figures of one round."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import adapter
from benchmarks.peers.environment import OVERLAYS
from benchmarks.peers.processes import last_line, proportional_memory, running, wait_until_alive
from benchmarks.peers.servers import Servers
from benchmarks.peers.table import crash_sentence, steady_rate

SLOTS = (2, 4, 8)
STEP_SECONDS = 300


@dataclass(frozen=True)
class Sizes:
    """How much each workload does."""

    tasks: int = 10_000
    naps: int = 5_000
    seconds: float = 8.0
    sends: int = 1_000
    latencies: int = 200
    idle_seconds: float = 3.0
    crash_seconds: float = 20.0


QUICK = Sizes(
    tasks=200, naps=200, seconds=1.0, sends=50, latencies=10, idle_seconds=0.5, crash_seconds=2.0
)


class PeerFailed(Exception):
    """A peer could not carry out a step; the message is the reason in one line."""


@dataclass(frozen=True)
class Bench:
    """One peer with the servers and a directory of its own."""

    peer: str
    servers: Servers
    place: Path
    sizes: Sizes

    def step(self, environment: dict[str, str], name: str, *arguments: object) -> Any:
        """Carry out one step of the adapter in a process of its own."""
        command = [sys.executable, "-m", "benchmarks.peers.agent", self.peer, name]
        try:
            done = subprocess.run(
                [*command, *map(str, arguments)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=STEP_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PeerFailed(f"{name} took longer than {STEP_SECONDS} s") from error
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise PeerFailed(f"{name}: {lines[-1].strip()[:200] if lines else 'no output'}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    @contextmanager
    def fresh(self, workload: str) -> Iterator[dict[str, str]]:
        """Set the peer up on empty servers; the environment names them."""
        self.servers.empty_redis()
        with self.servers.database(f"peers_{os.getpid()}") as url:
            environment = self.environment(url) | {adapter.WORKLOAD: workload}
            self.step(environment, "set_up")
            yield environment

    def environment(self, database: str) -> dict[str, str]:
        """Return the environment of the peer's processes."""
        overlay = Path(sys.prefix, OVERLAYS, self.peer)
        return {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": str(overlay) if overlay.exists() else "",
            adapter.DATABASE: database,
            adapter.REDIS: self.servers.redis,
            adapter.AMQP: self.servers.amqp,
            adapter.VARIANT: adapter.PEERS[self.peer][1],
            adapter.JOURNAL: str(self.place / "journal"),
        }

    @contextmanager
    def worker(
        self, environment: dict[str, str], slots: int, recycle: int | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker until the block ends."""
        command = self.step(environment, "worker_command", slots, recycle or 0)
        with running(command, environment, self.log) as process:
            yield process

    @contextmanager
    def watched(
        self,
        environment: dict[str, str],
        count: int,
        seconds: float,
        slots: int,
        recycle: int | None = None,
    ) -> Iterator[tuple[subprocess.Popen[bytes], list[list[float]]]]:
        """Run a worker and sample its progress from before its start; lend both once that is over."""
        stop = self.place / "stop"
        stop.unlink(missing_ok=True)
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(self.step, environment, "watch", count, seconds, stop)
            try:
                with self.worker(environment, slots, recycle) as worker:
                    while not watching.done():
                        if worker.poll() is not None:
                            stop.touch()
                        time.sleep(0.05)
                    yield worker, watching.result()
            finally:
                stop.touch()

    @property
    def log(self) -> Path:
        """The output of the peer's workers."""
        return self.place / f"{self.peer}.log"


def drain(bench: Bench, task: str, count: int, slots: int, recycle: int | None = None) -> float:
    """Start a worker on a full queue; return its steady rate in tasks/s."""
    with bench.fresh("naps" if task == "nap" else "drain") as environment:
        bench.step(environment, "enqueue_many", task, count)
        progress = bench.watched(environment, count, bench.sizes.seconds, slots, recycle)
        with progress as (worker, samples):
            if not samples[-1][1]:
                ended = "" if worker.poll() is None else f" (exit code {worker.returncode})"
                raise PeerFailed(f"the worker finished nothing{ended}: {last_line(bench.log)}")
    return steady_rate(samples)


def drains(bench: Bench, facts: dict[str, Any]) -> dict[str, float]:
    """Drain no-op tasks with 2, 4 and 8 slots."""
    return {f"drain {slots}": drain(bench, "noop", bench.sizes.tasks, slots) for slots in SLOTS}


def recycling(bench: Bench, facts: dict[str, Any]) -> dict[str, float]:
    """Drain with every process replaced after 100 tasks, where the peer offers it."""
    if not facts["recycles"]:
        return {}
    return {"recycling": drain(bench, "noop", bench.sizes.tasks, 4, 100)}


def naps(bench: Bench, facts: dict[str, Any]) -> dict[str, float]:
    """Drain tasks of 5 ms with 8 slots, as part of the ideal 1,600 tasks/s."""
    rate = drain(bench, "nap", bench.sizes.naps, 8)
    return {"naps": rate * adapter.NAP_SECONDS / 8}


def latency(bench: Bench, facts: dict[str, Any]) -> dict[str, float]:
    """Send to an idle worker with 4 slots and wait for the result."""
    with bench.fresh("latency") as environment, bench.worker(environment, 4):
        bench.step(environment, "latencies", 3)
        taken = bench.step(environment, "latencies", bench.sizes.latencies)
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50": cuts[49] * 1000, "p99": cuts[98] * 1000}


def sending(bench: Bench, facts: dict[str, Any]) -> dict[str, float]:
    """Enqueue one by one and in bulk, without a worker."""
    with bench.fresh("sending") as environment:
        seconds = bench.step(environment, "enqueue", "noop", bench.sizes.sends)
        figures = {"send": bench.sizes.sends / seconds}
        if facts["bulk"]:
            seconds = bench.step(environment, "enqueue_many", "noop", bench.sizes.tasks)
            figures["bulk"] = bench.sizes.tasks / seconds
    return figures


def memory(bench: Bench, facts: dict[str, Any]) -> dict[str, float]:
    """Let a worker with 4 slots run some tasks, and add up its memory while it is idle."""
    with bench.fresh("memory") as environment:
        bench.step(environment, "enqueue_many", "nap", 100)
        with bench.watched(environment, 100, bench.sizes.seconds, 4) as (worker, _):
            if not wait_until_alive(worker, bench.sizes.idle_seconds):
                raise PeerFailed(f"the idle worker ended: {last_line(bench.log)}")
            size, processes = proportional_memory(worker.pid)
    return {"memory": size, "processes": processes}


def crash(bench: Bench, facts: dict[str, Any]) -> dict[str, str]:
    """Let 1 of 100 tasks end its process; say what became of it and of the others."""
    journal = bench.place / "journal"
    journal.write_text("")
    with bench.fresh("crash") as environment:
        bench.step(environment, "enqueue", "mark", 100)
        with bench.watched(environment, 99, bench.sizes.crash_seconds, 4) as (worker, _):
            time.sleep(bench.sizes.idle_seconds)
            is_alive = worker.poll() is None
            state = bench.step(environment, "crash_state")
        return {"crash": crash_sentence(journal.read_text().splitlines(), state, is_alive)}


Workload = Callable[[Bench, dict[str, Any]], "dict[str, float] | dict[str, str]"]
WORKLOADS: dict[str, Workload] = {
    "drain": drains,
    "latency": latency,
    "sending": sending,
    "naps": naps,
    "recycling": recycling,
    "memory": memory,
    "crash": crash,
}


def once(workload: str) -> bool:
    """Whether a workload runs in the first round only: its answer is a sentence."""
    return workload == "crash"


def in_turns(peers: Sequence[str], round_number: int) -> list[str]:
    """Rotate the order from round to round: on a shared machine the first may be favoured."""
    shift = round_number % len(peers) if peers else 0
    return [*peers[shift:], *peers[:shift]]
