"""The worker's HTTP address for monitoring: ``/metrics`` for Prometheus, ``/livez`` and ``/readyz`` for
probes. A thread serves the address, so that probes get a response while the loop waits or hangs. The thread
only reads counters, and the loop never waits for it. A scrape takes 1 ms of interpreter time, or 70 ms with
200 task names; the loop can run in between.
"""

from __future__ import annotations

import logging
import os
import platform
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, AddressFamily, socket
from typing import Any, NamedTuple

from horsies._version import __version__
from horsies.logs import as_event
from horsies.monitor.measures import BOUNDS
from horsies.monitor.metrics import OTHER, Histogram, Sample, Value, exposition
from horsies.worker import os_process
from horsies.worker.agenda import lifetime_clock
from horsies.worker.tally import ENDS, TURN_BOUNDS, Counts, Key, Tally

logger = logging.getLogger("horsies.worker")

# How late the loop may be before it counts as hung.
STALL_SECONDS = 30.0
REQUEST_SECONDS = 5.0
CONNECTIONS_MAX = 32
_MEGABYTE = 1024 * 1024


class Answer(NamedTuple):
    """The response to an HTTP request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def line(cls, text: str, *, ok: bool) -> Answer:
        """Return the response to a probe, as one line of text."""
        return cls(200 if ok else 503, f"{text}\n".encode())


# Functions by path; the argument is the Accept header.
Routes = Mapping[str, Callable[[str], Answer]]


class AddressError(Exception):
    """The address for monitoring cannot be used."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """A worker's state at one moment. ``awake_by`` is the time by which its loop should run again."""

    awake_by: float
    has_started: bool
    is_stopping: bool
    is_connected: bool
    is_receiving: bool
    reconnects: int
    unrecorded: int
    children_busy: int
    children_idle: int
    children_other: int
    children_started: int
    child_pids: list[int]
    child_deaths: Mapping[str, int]


def judge_liveness(vitals: Vitals, now: float) -> Answer:
    """Report a failure if the loop hangs. A lost database is not reported, because a restart of the worker
    would not help.
    """
    late = now - vitals.awake_by
    if vitals.has_started and late > STALL_SECONDS:
        return Answer.line(f"the loop has not run for {late:.0f} s", ok=False)
    return Answer.line("alive", ok=True)


def judge_readiness(vitals: Vitals, *, is_scheduling: bool = True) -> Answer:
    """Report a failure while this worker cannot claim tasks, or while its scheduler cannot send anything."""
    problems = {
        "the worker is starting": not vitals.has_started,
        "the worker is shutting down": vitals.is_stopping,
        "the database is not connected": not vitals.is_connected,
        "no child process is ready": vitals.children_busy + vitals.children_idle == 0,
        "the scheduler is not connected to the database": not is_scheduling,
    }
    for problem, is_present in problems.items():
        if is_present:
            return Answer.line(problem, ok=False)
    return Answer.line("ready", ok=True)


def worker_values(vitals: Vitals, tally: Tally) -> Iterator[Value]:
    """Return a worker's metrics, as described in the catalogue."""
    totals = tally.totals()
    yield from _attempt_values(totals)
    yield from _wait_values(totals)
    yield Sample("horsies_tasks_handed_out_total", ("alone",), tally.handed_alone)
    yield Sample("horsies_tasks_handed_out_total", ("window",), tally.handed_behind)
    yield Sample("horsies_turns_total", (), tally.turns)
    yield Sample("horsies_turn_tasks_total", (), tally.turn_tasks)
    name = "horsies_turn_duration_seconds"
    yield Histogram(name, (), TURN_BOUNDS, list(tally.turn_buckets), tally.turn_seconds)
    yield Sample("horsies_children", ("busy",), vitals.children_busy)
    yield Sample("horsies_children", ("idle",), vitals.children_idle)
    yield Sample("horsies_children", ("other",), vitals.children_other)
    yield Sample("horsies_children_started_total", (), vitals.children_started)
    for cause, count in vitals.child_deaths.items():
        yield Sample("horsies_child_deaths_total", (cause,), count)
    for part, pids in (("parent", [os.getpid()]), ("children", vitals.child_pids)):
        used = os_process.rss_megabytes(pids) * _MEGABYTE
        yield Sample("horsies_worker_memory_bytes", (part,), used)
    yield Sample("horsies_outcomes_unrecorded", (), vitals.unrecorded)
    yield Sample("horsies_database_reconnects_total", (), vitals.reconnects)
    yield Sample("horsies_notifications_arriving", (), float(vitals.is_receiving))
    yield Sample("horsies_build_info", (__version__, platform.python_version()), 1)


def _attempt_values(totals: Mapping[Key, Counts]) -> Iterator[Value]:
    labelled: dict[Key, Counts] = {}
    for (queue, name), counts in totals.items():
        label = queue, name or OTHER  # a task can have this name
        labelled[label] = counts.plus(labelled[label]) if label in labelled else counts
    for (queue, task), counts in labelled.items():
        for end, count in zip(ENDS, counts.ends, strict=True):
            yield Sample("horsies_attempts_total", (queue, task, end), count)
        name = "horsies_attempt_duration_seconds"
        yield Histogram(name, (queue, task), BOUNDS, counts.ran, counts.ran_seconds)


def _wait_values(totals: Mapping[Key, Counts]) -> Iterator[Value]:
    by_queue: dict[str, Counts] = {}
    for (queue, _), counts in totals.items():
        by_queue[queue] = counts.plus(by_queue[queue]) if queue in by_queue else counts
    for queue, counts in by_queue.items():
        name, seconds = "horsies_wait_seconds", counts.waited_seconds
        yield Histogram(name, (queue,), BOUNDS, counts.waited, seconds)


def worker_routes(
    read_vitals: Callable[[], Vitals],
    tally: Tally,
    is_scheduling: Callable[[], bool] = lambda: True,
) -> Routes:
    """A worker's paths."""
    return {
        "/metrics": lambda accept: scraped(worker_values(read_vitals(), tally), accept),
        "/livez": lambda _: judge_liveness(read_vitals(), lifetime_clock()),
        "/readyz": lambda _: judge_readiness(read_vitals(), is_scheduling=is_scheduling()),
    }


def scraped(values: Iterable[Value], accept: str) -> Answer:
    """Return the response to a scrape."""
    return Answer(200, *exposition(values, accept))


@contextmanager
def serving(host: str, port: int, routes: Routes) -> Iterator[int]:
    """Serve the paths in a thread until the block ends; yield the port (for 0, the system chooses one)."""
    try:
        server = _Server(host, port, routes)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AddressError(f"Metrics cannot be served on {host}:{port}: {reason}.") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    served = int(server.server_address[1])
    event = as_event("metrics_served", port=served)
    logger.info("metrics on http://%s:%d/metrics", host, served, extra=event)
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    """Answers every request in its own thread, so that a slow client does not delay a probe.

    A new connection beyond the limit closes the oldest connection, so that slow clients cannot use up the
    worker's threads and descriptors.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        self.routes = routes
        self._open: dict[socket, None] = {}
        if ":" in host:
            self.address_family = AddressFamily.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer would ask the resolver for the host's name.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        for oldest in list(self._open)[: len(self._open) - CONNECTIONS_MAX + 1]:
            self._open.pop(oldest, None)
            with suppress(OSError):  # the connection may already be closed
                oldest.shutdown(SHUT_RDWR)
        self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request for metrics failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version = "horsies"
    sys_version = ""

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            paths = ", ".join(self.server.routes)
            answer = Answer(404, f"There are {paths} here.\n".encode())
        else:
            answer = route(self.headers.get("Accept", ""))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        logger.debug("metrics: " + format, *args)
