"""`horsies health` and `horsies metrics`: probes and Prometheus metrics."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from horsies.cli import output
from horsies.cli.options import (
    DatabaseUrlOption,
    DatabaseUrlsOption,
    LocatorArgument,
    LocatorsArgument,
    ModuleOption,
    refuse_missing_extra,
)
from horsies.cli.session import (
    EXIT_FAILED,
    JsonOption,
    Session,
    exit_with,
    open_session,
    open_sessions,
    read_each,
    unwrap_or_exit,
)
from horsies.db.statement import Script
from horsies.db.statements.monitor import WorkerSummary
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.monitor.defaults import PING_TIMEOUT_SECONDS
from horsies.monitor.diagnose.attention import findings_of
from horsies.monitor.diagnose.slow import PATIENCE_SECONDS, SCRAPED_SECONDS, SlowChecks
from horsies.monitor.documents import worker_document
from horsies.monitor.health import WorkerPong, ping_workers
from horsies.monitor.metrics import UP, ClusterGauges, Sample, exposition_of
from horsies.monitor.overview import WorkerHealth, health_of, read_workers
from horsies.result import Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker
from horsies.worker.config import DEFAULT_HOST
from horsies.worker.probe import AddressError, Answer, Routes, serving

DEFAULT_PORT = 9464

WorkerOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only ask the workers with this --name, id or host name."),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        min=0.1, max=60.0, metavar="SECONDS", help="How long to wait for responses, in seconds."
    ),
]


def health(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    database_url: DatabaseUrlOption = None,
    worker: WorkerOption = None,
    timeout: TimeoutOption = PING_TIMEOUT_SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Ping the workers, for probes.

    A ping goes through the database and a worker's loop, so a response proves that both work.

    Exit codes: 0 a worker responded, 1 no worker responded, or the database cannot be used.

    Example:
        horsies health --worker $HOSTNAME
    """
    with open_session("health", module or locator, database_url) as session:
        found = unwrap_or_exit(read_workers(session.broker))
        asked = [one for one in found if worker in (None, one.name, one.worker_id, one.hostname)]
        pongs = _ping(session.broker, asked, timeout)
    if as_json:
        documents = [_document(one, pongs.get(one.worker_id)) for one in asked]
        output.print_json({"ok": bool(pongs), "workers": documents})
    elif pongs:
        slowest = max(pong.latency_ms for pong in pongs.values())
        typer.echo(f"{len(pongs)} of {len(asked)} worker(s) answered within {slowest:.0f} ms.")
    if not pongs:
        named = "" if worker is None else f" named {worker!r}"
        exit_with(
            f"None of {len(asked)} worker(s){named} answered."
            if asked
            else f"No worker{named} runs.",
            EXIT_FAILED,
        )


def _ping(
    broker: PostgresBroker, asked: Sequence[WorkerSummary], timeout: float
) -> dict[str, WorkerPong]:
    if not asked:
        return {}
    target = asked[0].worker_id if len(asked) == 1 else None
    alive = sum(health_of(one) is WorkerHealth.ALIVE for one in asked)
    # A worker outside the selection may respond first; its response must not stop the wait.
    done = ping_workers(broker, target, timeout, max(1, alive), {one.worker_id for one in asked})
    return {pong.worker_id: pong for pong in unwrap_or_exit(done)}


def _document(worker: WorkerSummary, pong: WorkerPong | None) -> dict[str, Any]:
    known = worker_document(worker, pong)
    return {name: known[name] for name in ("id", "name", "hostname", "pid", "state", "ping_ms")}


def metrics(
    locators: LocatorsArgument = None,
    module: ModuleOption = None,
    database_urls: DatabaseUrlsOption = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address.")] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="The port; 0: any free port.")
    ] = DEFAULT_PORT,
) -> None:
    """Serve the cluster-wide gauges for Prometheus, until a signal stops it.

    The dashboard serves the same text at /metrics. Any number of scrapers share one collection every
    five seconds. A worker's own counters are on its --metrics-port. With several databases, gauges have
    the label `database`.

    Example:
        horsies metrics --port 9400
    """
    refuse_missing_extra("horsies metrics")
    named = [module] if module else locators
    with open_sessions("metrics", named, database_urls) as sessions:
        attach_handler(LogLevel.INFO, LogFormat.TEXT)
        try:
            with serving(host, port, _routes(sessions)):
                _wait_for_signal()
        except AddressError as error:
            exit_with(str(error), EXIT_FAILED)


def _wait_for_signal() -> None:
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()


def _routes(sessions: Sequence[Session]) -> Routes:
    collectors = {session.name: _Collector(session) for session in sessions}

    def collect() -> dict[str, Sequence[Sample]]:
        found = read_each(sessions, lambda session: collectors[session.name].collect())
        return {session.name: done.ok_value for session, done in found if isinstance(done, Ok)}

    def readyz(_: str) -> Answer:
        down = [name for name, samples in collect().items() if UP not in samples]
        text = f"the database {', '.join(down)} cannot be read".replace("  ", " ")
        return Answer.line(text if down else "ready", ok=len(down) < len(sessions))

    return {
        "/metrics": lambda accept: Answer(200, *exposition_of(collect(), accept)),
        "/livez": lambda _: Answer.line("alive", ok=True),
        "/readyz": readyz,
    }


class _Collector:
    """The gauges of one database, read by one scraper at a time. A separate thread runs the slower
    checks, so that no scrape waits long for them.
    """

    def __init__(self, session: Session) -> None:
        self._broker = session.broker
        self._gauges = ClusterGauges(session.broker.config.schema_name, session.queue_caps or {})
        self._collecting = threading.Lock()
        self._slow = SlowChecks()

    def collect(self) -> BrokerResult[Sequence[Sample]]:
        """Return recent gauges. If the database cannot be read, return a gauge that reports it as down."""
        with self._collecting:
            if (fresh := self._gauges.fresh()) is not None:
                return Ok(fresh)
            if not self._is_read(self._gauges.script()):
                self._gauges.note_failure()
            elif self._gauges.wants_details():
                self._add_details()
            return Ok(self._gauges.samples())

    def _add_details(self) -> None:
        if self._slow.is_due(SCRAPED_SECONDS):
            run = threading.Thread(target=self._slow.refresh, args=(self._broker,), daemon=True)
            run.start()
            run.join(PATIENCE_SECONDS)
        self._gauges.note_slow_findings(findings_of(self._slow.reports))
        if not self._is_read(self._gauges.details_script()):
            self._gauges.note_no_details()

    def _is_read(self, script: Script[None]) -> bool:
        return self._broker.perform(BrokerErrorCode.MONITORING_QUERY_FAILED, script).is_ok()
