"""The workloads, the same for all peers. Each returns named figures of one round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from benchmarks.peers import adapter
from benchmarks.peers.bench import Bench, PeerFailed
from benchmarks.peers.processes import last_line, proportional_memory
from benchmarks.peers.table import crash_sentence, steady_rate

Figures = Iterator[tuple[str, "float | str"]]


def drain(bench: Bench, task: str, count: int, slots: int, recycle: int = 0) -> float:
    """Start a worker on a full queue; return its steady rate in tasks/s."""
    with bench.fresh("naps" if task == "nap" else "drain", task, count) as environment:
        progress = bench.watched(environment, count, count, bench.sizes.seconds, slots, recycle)
        with progress as (worker, samples):
            if samples[-1][1] <= samples[0][1]:
                ended = "" if worker.poll() is None else f" (exit code {worker.returncode})"
                raise PeerFailed(f"the worker finished nothing{ended}: {last_line(bench.log)}")
    return steady_rate(samples)


def noops(slots: int, bench: Bench) -> Figures:
    """Drain no-op tasks."""
    yield f"drain {slots}", drain(bench, "noop", bench.sizes.tasks, slots)


def recycling(bench: Bench) -> Figures:
    """Drain with every process replaced after 100 tasks, where the peer offers it."""
    if bench.facts["recycles"]:
        yield "recycling", drain(bench, "noop", bench.sizes.tasks, 4, 100)


def naps(bench: Bench) -> Figures:
    """Drain tasks of 5 ms with 8 slots; return the fraction of the ideal 1,600 tasks/s."""
    yield "naps", drain(bench, "nap", bench.sizes.naps, 8) * adapter.NAP_SECONDS / 8


def latency(bench: Bench) -> Figures:
    """Send to an idle worker with 4 slots and wait for the result; then measure its idle memory. 40
    earlier tasks make the worker start all processes, because some workers start them on demand.
    """
    prepared = bench.fresh("latency", "nap", 40)
    with prepared as environment, bench.worker(environment, 4) as worker:
        taken = bench.step(environment, "latencies", bench.sizes.latencies)
        cuts = statistics.quantiles(taken, n=100, method="inclusive")
        yield "p50", cuts[49] * 1000
        yield "p99", cuts[98] * 1000
        time.sleep(bench.sizes.idle_seconds)
        if worker.poll() is not None:
            raise PeerFailed(f"the idle worker ended: {last_line(bench.log)}")
        size, processes = proportional_memory(worker.pid)
        yield "memory", size
        yield "processes", float(processes)


def sending(bench: Bench) -> Figures:
    """Enqueue one by one and in bulk, without a worker."""
    with bench.fresh("sending") as environment:
        sizes = bench.sizes
        yield "send", sizes.sends / bench.step(environment, "enqueue", "noop", sizes.sends)
        if bench.facts["bulk"]:
            yield "bulk", sizes.tasks / bench.step(environment, "enqueue_many", "noop", sizes.tasks)


def crash(bench: Bench) -> Figures:
    """Let 1 of 100 tasks kill its process; report the outcomes of this task and of the others."""
    journal = bench.place / "journal"
    journal.write_text("")
    with bench.fresh("crash") as environment:
        bench.step(environment, "enqueue", "mark", 100)
        with bench.watched(environment, 100, 99, bench.sizes.crash_seconds, 4) as (worker, _):
            time.sleep(bench.sizes.idle_seconds)
            state = bench.step(environment, "crash_state")
            is_alive = worker.poll() is None
        yield "crash", crash_sentence(journal.read_text().splitlines(), state, is_alive)


WORKLOADS: dict[str, Callable[[Bench], Figures]] = {
    "drain 2": partial(noops, 2),
    "drain 4": partial(noops, 4),
    "drain 8": partial(noops, 8),
    "latency": latency,
    "sending": sending,
    "naps": naps,
    "recycling": recycling,
    "crash": crash,
}


def once(workload: str) -> bool:
    """Return whether a workload runs in the first round only, because its result is a sentence."""
    return workload == "crash"


def in_turns(peers: Sequence[str], round_number: int) -> list[str]:
    """Rotate the order between rounds, because the first peer may have an advantage on a shared machine."""
    shift = round_number % len(peers) if peers else 0
    return [*peers[shift:], *peers[:shift]]
