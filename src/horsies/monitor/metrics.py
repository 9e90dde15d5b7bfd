"""Prometheus metrics: the catalogue, the cluster-wide gauges, and the text for scrapers.

``prometheus_client`` is an optional dependency, the extra ``metrics``: only the functions that write
text or register counters import it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from horsies.db.statement import Script
from horsies.db.statements.doctor import Loss, list_losses
from horsies.db.statements.keys import KeyCounts, count_keys
from horsies.db.statements.metrics import (
    Gauges,
    TableSize,
    read_gauges,
    read_table_sizes,
)
from horsies.db.statements.monitor import WorkerSummary
from horsies.findings import CATALOGUE as FINDINGS
from horsies.findings import Finding, Level
from horsies.monitor.defaults import LOSSES_MOST, LOSSES_SECONDS, OVERDUE_SECONDS
from horsies.monitor.facts import Facts
from horsies.monitor.measures import BOUNDS, NAMES_MAX, Series, read_split_measures_script
from horsies.monitor.overview import (
    Overview,
    QueueOverview,
    health_of,
    misses_notifications,
    overview_script,
    servers_by_queue,
)
from horsies.tasks.send import Producer, Sent

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

# The maximum age of a collection that scrapers share; findings and table sizes are read less often.
COLLECT_SECONDS = 5.0
FINDINGS_SECONDS = 15.0
SIZES_SECONDS = 60.0
# The period of the rate that determines the time to drain a queue.
RATE_SPAN = timedelta(minutes=5)
# The number up to which runs and schedules are counted.
COUNT_MOST = 10_000
# The number up to which the keys of a queue are counted.
KEYS_MOST = 1_000

Kind = Literal["gauge", "counter", "histogram"]
Source = Literal["cluster", "worker", "producer"]


class Metric(NamedTuple):
    """One catalogue entry. ``values`` are the values of its last label, if they are fixed."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    source: Source
    text: str
    values: tuple[str, ...] = ()


def _metrics(source: Source, *rows: tuple[Any, ...]) -> tuple[Metric, ...]:
    return tuple(Metric(name, kind, labels, source, *rest) for name, kind, labels, *rest in rows)


CLUSTER = _metrics(
    "cluster",
    (
        *("horsies_queue_tasks", "gauge", ("queue", "state")),
        "Unfinished tasks. Due and delayed tasks are counted up to 10,000 each.",
        ("due", "delayed", "claimed", "running"),
    ),
    (
        *("horsies_queue_oldest_due_seconds", "gauge", ("queue",)),
        "The waiting time of the oldest due task; 0 without due tasks.",
    ),
    (
        *("horsies_queue_drain_seconds", "gauge", ("queue",)),
        "The number of due tasks divided by the rate at which tasks ended in the last five minutes; "
        "0 without due tasks, +Inf if no task ended.",
    ),
    (
        *("horsies_queue_children", "gauge", ("queue", "state")),
        "Child processes of the live workers that serve the queue.",
        ("busy", "idle"),
    ),
    (*("horsies_queue_paused", "gauge", ("queue",)), "1 while the queue is paused."),
    (
        *("horsies_queue_cap", "gauge", ("queue",)),
        "The smallest max_concurrency of the queue among its workers; absent without a cap.",
    ),
    (
        *("horsies_queue_keys", "gauge", ("queue", "state")),
        "The number of keys with due tasks, counted up to 1,000, and of paused or halted keys. Absent for a "
        "queue without keys.",
        ("due", "paused"),
    ),
    (
        *("horsies_workers", "gauge", ("state",)),
        "Workers that have not shut down; a polling worker is alive but receives no notifications.",
        ("alive", "polling", "silent", "lost"),
    ),
    (
        *("horsies_workers_lost_total", "counter", ()),
        "Workers that other workers declared lost, counted from one hour before the start of this process.",
    ),
    (
        *("horsies_workflow_runs", "gauge", ("status",)),
        "Unfinished runs, counted up to 10,000.",
        ("running", "paused"),
    ),
    (
        *("horsies_workflow_paused_oldest_seconds", "gauge", ()),
        "The time since the oldest pause of a paused run; 0 without paused runs.",
    ),
    (
        *("horsies_durable_runs", "gauge", ("state",)),
        "Runs of durable functions that are parked, or held because their code does not match their recorded "
        "steps; counted up to 10,000 in total.",
        ("parked", "held"),
    ),
    (
        *("horsies_schedules_overdue", "gauge", ()),
        "Schedules with a slot that is more than 15 seconds overdue.",
    ),
    (
        *("horsies_schedule_lag_seconds", "gauge", ()),
        "The delay of the most overdue schedule; 0 without overdue schedules.",
    ),
    (*("horsies_tasks_stored", "gauge", ()), "The estimated number of rows in the table of tasks."),
    (
        *("horsies_table_bytes", "gauge", ("table",)),
        "The size of a table with its indexes, read once a minute.",
    ),
    (
        *("horsies_table_dead_rows", "gauge", ("table",)),
        "Dead rows of a table that vacuum has not removed, read once a minute.",
    ),
    (
        *("horsies_oldest_transaction_seconds", "gauge", ()),
        "The age of the oldest open transaction of the database that the role may see.",
    ),
    (
        *("horsies_notify_queue_ratio", "gauge", ()),
        "The used fraction of the server's notification queue, from 0 to 1.",
    ),
    (
        *("horsies_findings", "gauge", ("code", "level")),
        "Findings of `horsies doctor`, read every 15 seconds, or every five minutes if the check is slow; "
        "NOT_CHECKED if checks failed.",
        tuple(Level),
    ),
    (
        *("horsies_collect_seconds", "gauge", ()),
        "The duration of the collection of the cluster's gauges.",
    ),
    (
        *("horsies_up", "gauge", ()),
        "1 if the database could be read; if it is 0, the other gauges are absent.",
    ),
)
WORKER = _metrics(
    "worker",
    (
        *("horsies_attempts_total", "counter", ("queue", "task", "outcome")),
        "Attempts whose outcome this worker recorded; a retried attempt is followed by another attempt.",
        ("completed", "failed", "retried", "crashed", "timeout", "cancelled", "stopped"),
    ),
    (
        *("horsies_attempt_duration_seconds", "histogram", ("queue", "task")),
        "The run time of attempts in their child.",
    ),
    (
        *("horsies_wait_seconds", "histogram", ("queue",)),
        "The time from the due time of tasks to their start.",
    ),
    (
        *("horsies_tasks_handed_out_total", "counter", ("way",)),
        "Tasks that were assigned to children, alone or in a window after another task of the same child.",
        ("alone", "window"),
    ),
    (*("horsies_turns_total", "counter", ()), "Transactions that record and claim tasks."),
    (*("horsies_turn_tasks_total", "counter", ()), "Tasks that were recorded or claimed in turns."),
    (*("horsies_turn_duration_seconds", "histogram", ()), "The duration of a turn."),
    (
        *("horsies_children", "gauge", ("state",)),
        "Child processes of this worker.",
        ("busy", "idle", "other"),
    ),
    (*("horsies_children_started_total", "counter", ()), "Child processes that became ready."),
    (
        *("horsies_child_deaths_total", "counter", ("cause",)),
        "Child processes that exited or were killed, by signal or exit code.",
    ),
    (
        *("horsies_worker_memory_bytes", "gauge", ("part",)),
        "Resident memory of the worker; shared pages are counted for each child.",
        ("parent", "children"),
    ),
    (
        *("horsies_outcomes_unrecorded", "gauge", ()),
        "Finished attempts whose outcome is not in the database yet.",
    ),
    (
        *("horsies_database_reconnects_total", "counter", ()),
        "The number of times the worker reconnected to the database.",
    ),
    (
        *("horsies_notifications_arriving", "gauge", ()),
        "1 while notifications reach this worker; 0 while it finds work by polling.",
    ),
    (*("horsies_build_info", "gauge", ("version", "python")), "Always 1."),
)
PRODUCER = _metrics(
    "producer",
    (
        *("horsies_sends_total", "counter", ("queue", "task", "result")),
        "Tasks that this process sent; a failed send_many counts as one task.",
        ("stored", "duplicate", "failed"),
    ),
    (
        *("horsies_send_duration_seconds", "histogram", ("queue", "task")),
        "The duration of a send without the checks of its arguments.",
    ),
)
CATALOGUE = (*CLUSTER, *WORKER, *PRODUCER)
RED_CODES = tuple(code for code, entry in FINDINGS.items() if entry.level is Level.RED)
_BY_NAME = {metric.name: metric for metric in CATALOGUE}

# The label for all tasks beyond a process's first 200 names, and for all queues beyond the first 500.
OTHER = "other"
QUEUES_MAX = 500


class Sample(NamedTuple):
    """One value of a metric, with its label values."""

    name: str
    labels: tuple[str, ...]
    value: float


class Histogram(NamedTuple):
    """One histogram's counts by bucket, and the sum of its observations."""

    name: str
    labels: tuple[str, ...]
    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


Value = Sample | Histogram


class MissingExtraError(Exception):
    """``prometheus_client`` is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "Metrics need the package prometheus-client: pip install '/path/to/horsies[metrics]'."
        )


def require_prometheus() -> None:
    """Raise ``MissingExtraError`` if the extra ``metrics`` is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise MissingExtraError from None


def exposition(values: Iterable[Value], accept: str = "") -> tuple[bytes, str]:
    """Return the text for a scraper, and its content type."""
    return exposition_of({"": values}, accept)


def exposition_of(
    by_database: Mapping[str, Iterable[Value]], accept: str = ""
) -> tuple[bytes, str]:
    """Return the text for several databases, distinguished by the label ``database``; the name "" gets
    no label.
    """
    require_prometheus()
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(by_database))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Collected:
    """A collector that returns values that were read before."""

    def __init__(self, by_database: Mapping[str, Iterable[Value]]) -> None:
        self._by_database = by_database

    def collect(self) -> Iterator[Family]:
        by_name: dict[str, list[Value]] = {}
        for database, values in self._by_database.items():
            for value in values:
                labelled = _of_database(value, database) if database else value
                by_name.setdefault(value.name, []).append(labelled)
        is_labelled = any(self._by_database)
        for name, values in by_name.items():
            metric = _BY_NAME[name]
            if is_labelled:
                metric = metric._replace(labels=("database", *metric.labels))
            yield _family(metric, values)


def _of_database(value: Value, database: str) -> Value:
    return value._replace(labels=(database, *value.labels))


def _family(metric: Metric, values: Iterable[Value]) -> Family:
    from prometheus_client import core

    if metric.kind == "histogram":
        histograms = core.HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
        for one in values:
            assert isinstance(one, Histogram)
            histograms.add_metric(one.labels, _cumulated(one), one.total)
        return histograms
    make = core.GaugeMetricFamily if metric.kind == "gauge" else core.CounterMetricFamily
    family = make(metric.name, metric.text, labels=metric.labels)
    for one in values:
        assert isinstance(one, Sample)
        family.add_metric(one.labels, one.value)
    return family


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    bounds, below = [*map(str, histogram.bounds), "+Inf"], 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, histogram.counts, strict=True):
        below += count
        buckets.append((bound, below))
    return buckets


@dataclass
class ClusterGauges:
    """The cluster's gauges, collected at most every five seconds for any number of scrapers. While
    ``fresh`` is None, one caller at a time runs ``script`` on its own connection. If ``wants_details``
    is then true, the caller also runs ``details_script``, for findings and table sizes, in another
    transaction, so that a table lock that blocks it does not hide other gauges; before that, it passes
    the findings of the slower checks.
    """

    schema: str
    configured: Mapping[str, int | None] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    # The gauges; empty while the database cannot be read.
    _samples: Sequence[Sample] = ()
    _seconds: float = 0.0
    _collected_at: float | None = None
    # The rows of the last collection, which the checks reuse, and the findings.
    _facts: Facts = field(default_factory=Facts)
    _findings: Sequence[Sample] = ()
    _slow_findings: Sequence[Sample] = ()
    _found_at: float | None = None
    _sizes: Sequence[TableSize] = ()
    _sized_at: float | None = None
    # The losses of the last hour that were already counted, and the total number of losses.
    _losses: set[tuple[str, datetime]] = field(default_factory=set)
    _lost: int = 0

    def fresh(self) -> Sequence[Sample] | None:
        """The last collection, if it is recent."""
        at = self._collected_at
        is_recent = at is not None and self.clock() - at < COLLECT_SECONDS
        return self.samples() if is_recent else None

    def samples(self) -> Sequence[Sample]:
        """The last collection, with the details unless they could not be read."""
        is_up = bool(self._samples)
        findings = added_samples(self._findings, self._slow_findings)
        details = [*findings, *size_samples(self._sizes)] if is_up else []
        return [*self._samples, *details, *_about(self._seconds, up=is_up)]

    def script(self) -> Script[None]:
        """Read the gauges and keep them."""
        started = self.clock()
        self._facts = Facts(self.schema)
        overview = yield from overview_script(self.configured, self._facts)
        series = yield from read_split_measures_script("queue", RATE_SPAN, durations=())
        query = read_gauges(self.schema, COUNT_MOST, OVERDUE_SECONDS)
        (gauges,) = yield query
        self._count_losses((yield from self._facts.read(list_losses(LOSSES_SECONDS, LOSSES_MOST))))
        keys: list[KeyCounts] = yield count_keys(KEYS_MOST)
        samples = list(cluster_samples(overview, series, gauges, keys))
        samples.append(Sample("horsies_workers_lost_total", (), self._lost))
        self._keep(samples, started)

    def _count_losses(self, losses: Iterable[Loss]) -> None:
        """Count only new losses, because a counter must never decrease when old rows are deleted."""
        found = {(one.worker_id, one.lost_at) for one in losses}
        self._lost += len(found - self._losses)
        self._losses = found

    def wants_details(self) -> bool:
        """Whether the findings need a new read. The caller has just run ``script``."""
        return _is_old(self._found_at, self.clock(), FINDINGS_SECONDS)

    def details_script(self) -> Script[None]:
        """Run the cheap checks on the last collection and further rows, and keep the findings; read the
        table sizes if they are old.
        """
        # Import the checks here, because workers and producers use this module without them.
        from horsies.monitor.diagnose.attention import findings_script

        started = self._found_at = self.clock()
        found = yield from findings_script(self._facts)
        self._findings = list(finding_samples(found))
        if _is_old(self._sized_at, started, SIZES_SECONDS):
            # Set the time before the read, so that a locked table costs one read per minute.
            self._sized_at = started
            self._sizes = yield read_table_sizes(self.schema)
        self._seconds += self.clock() - started

    def note_slow_findings(self, findings: Iterable[Finding]) -> None:
        """Keep the findings of the slower checks, which the caller runs less often."""
        self._slow_findings = list(finding_samples(findings, codes=()))

    def note_no_details(self) -> None:
        """Record that the details could not be read; this counts as a finding."""
        self._found_at = self.clock()
        self._findings = [Sample("horsies_findings", NOT_CHECKED, 1.0)]

    def note_failure(self) -> None:
        """Record that the database could not be read; this result is kept for the same time as others."""
        self._keep((), self.clock())

    def _keep(self, samples: Sequence[Sample], started: float) -> None:
        self._samples, self._collected_at = samples, self.clock()
        self._seconds = self._collected_at - started


def _is_old(read_at: float | None, now: float, seconds: float) -> bool:
    return read_at is None or now - read_at >= seconds


UP = Sample("horsies_up", (), 1.0)
# The labels of the finding that stands for unreadable findings.
NOT_CHECKED = ("NOT_CHECKED", Level.RED.value)


def _about(seconds: float, *, up: bool) -> Iterator[Sample]:
    yield Sample("horsies_collect_seconds", (), seconds)
    yield Sample("horsies_up", (), float(up))


def finding_samples(
    findings: Iterable[Finding], codes: Iterable[str] = RED_CODES
) -> Iterator[Sample]:
    """Count findings by code and level; these red codes have a count, even 0."""
    counts = {(code, Level.RED.value): 0 for code in codes}
    for one in findings:
        labels = one.code, one.level.value
        counts[labels] = counts.get(labels, 0) + 1
    for labels, count in sorted(counts.items()):
        yield Sample("horsies_findings", labels, count)


def added_samples(*groups: Iterable[Sample]) -> Iterator[Sample]:
    """Add up the values of samples with the same name and labels."""
    totals: dict[tuple[str, tuple[str, ...]], float] = {}
    for name, labels, value in chain(*groups):
        totals[name, labels] = totals.get((name, labels), 0.0) + value
    for (name, labels), value in sorted(totals.items()):
        yield Sample(name, labels, value)


def cluster_samples(
    overview: Overview,
    series: Mapping[str, Series],
    gauges: Gauges,
    keys: Iterable[KeyCounts],
) -> Iterator[Sample]:
    """Convert facts from the database to gauges."""
    own, others = split_queues(overview.queues)
    serving = servers_by_queue(overview.workers)
    for queue in own:
        servers = serving.get(queue.name, ())
        yield from _queue_samples(queue, servers, drain_seconds(queue.due, series.get(queue.name)))
    yield from _samples_of_others(others, serving, series)
    yield from _key_samples({queue.name for queue in own}, keys)
    for state, count in _worker_states(overview.workers).items():
        yield Sample("horsies_workers", (state,), count)
    yield Sample("horsies_workflow_runs", ("running",), gauges.running)
    yield Sample("horsies_workflow_runs", ("paused",), gauges.paused)
    yield Sample("horsies_workflow_paused_oldest_seconds", (), gauges.oldest_paused_seconds)
    yield Sample("horsies_durable_runs", ("parked",), gauges.parked)
    yield Sample("horsies_durable_runs", ("held",), gauges.held)
    yield Sample("horsies_schedules_overdue", (), gauges.overdue)
    yield Sample("horsies_schedule_lag_seconds", (), gauges.lag_seconds)
    yield Sample("horsies_tasks_stored", (), gauges.tasks_stored or 0.0)
    yield Sample("horsies_oldest_transaction_seconds", (), gauges.oldest_transaction_seconds)
    yield Sample("horsies_notify_queue_ratio", (), gauges.notify_queue_ratio)


def size_samples(sizes: Iterable[TableSize]) -> Iterator[Sample]:
    """Convert the sizes of tables to gauges."""
    for size in sizes:
        yield Sample("horsies_table_bytes", (size.name,), size.bytes)
        yield Sample("horsies_table_dead_rows", (size.name,), size.dead_rows)


def split_queues(
    queues: Sequence[QueueOverview],
) -> tuple[list[QueueOverview], list[QueueOverview]]:
    """Return the queues with their own series (the first queues by name), and the queues that share a
    series.
    """
    if len(queues) <= QUEUES_MAX:
        return list(queues), []
    named = [one for one in queues if one.name != OTHER][:QUEUES_MAX]
    names = {one.name for one in named}
    return named, [one for one in queues if one.name not in names]


def _samples_of_others(
    queues: Sequence[QueueOverview],
    serving: Mapping[str, Sequence[WorkerSummary]],
    series: Mapping[str, Series],
) -> Iterator[Sample]:
    """Sum the queues that share a series; the oldest task and the longest drain time are their maximum."""
    if not queues:
        return
    oldest = max((one.oldest_waiting_seconds or 0.0 for one in queues), default=0.0)
    shared = QueueOverview(
        OTHER,
        due=sum(one.due for one in queues),
        delayed=sum(one.delayed for one in queues),
        claimed=sum(one.claimed for one in queues),
        running=sum(one.running for one in queues),
        oldest_waiting_seconds=oldest,
        paused_at=next((one.paused_at for one in queues if one.paused_at), None),
    )
    drain = max(drain_seconds(one.due, series.get(one.name)) for one in queues)
    servers = {worker.worker_id: worker for one in queues for worker in serving.get(one.name, ())}
    yield from _queue_samples(shared, list(servers.values()), drain)


def _key_samples(own: Collection[str], keys: Iterable[KeyCounts]) -> Iterator[Sample]:
    shared = [0, 0]
    for one in keys:
        if one.queue_name in own:
            yield Sample("horsies_queue_keys", (one.queue_name, "due"), one.waiting)
            yield Sample("horsies_queue_keys", (one.queue_name, "paused"), one.paused)
        else:
            shared = [shared[0] + one.waiting, shared[1] + one.paused]
    if any(shared):
        yield Sample("horsies_queue_keys", (OTHER, "due"), shared[0])
        yield Sample("horsies_queue_keys", (OTHER, "paused"), shared[1])


def _queue_samples(
    queue: QueueOverview, serving: Collection[WorkerSummary], drain: float
) -> Iterator[Sample]:
    name = queue.name
    for state in ("due", "delayed", "claimed", "running"):
        yield Sample("horsies_queue_tasks", (name, state), getattr(queue, state))
    oldest = queue.oldest_waiting_seconds
    yield Sample("horsies_queue_oldest_due_seconds", (name,), oldest or 0.0)
    yield Sample("horsies_queue_drain_seconds", (name,), drain)
    busy = sum(one.tasks_running for one in serving)
    idle = sum(max(0, one.processes - one.tasks_running) for one in serving)
    yield Sample("horsies_queue_children", (name, "busy"), busy)
    yield Sample("horsies_queue_children", (name, "idle"), idle)
    yield Sample("horsies_queue_paused", (name,), float(queue.paused_at is not None))
    if caps := [cap for cap in queue.caps if cap is not None]:
        yield Sample("horsies_queue_cap", (name,), min(caps))


def drain_seconds(due: int, series: Series | None) -> float:
    """Return how long the due tasks will take at the recent rate."""
    if not due:
        return 0.0
    total = series.total if series else None
    ended = total.attempts - total.retried if total else 0
    return due * 60 / series.per_minute(ended) if series and ended else float("inf")


def _worker_states(workers: Iterable[WorkerSummary]) -> dict[str, int]:
    states = dict.fromkeys(("alive", "polling", "silent", "lost"), 0)
    for worker in workers:
        state = "polling" if misses_notifications(worker) else health_of(worker).value
        if state in states:
            states[state] += 1
    return states


class _Sends(Protocol):
    """The parts of an application that ``count_sends`` needs."""

    _producer: Producer


def count_sends(app: _Sends, registry: CollectorRegistry | None = None) -> None:
    """Count this process's sends as ``horsies_sends_total``, and measure their duration. The metrics are
    registered with ``registry``; by default, this is the registry of ``prometheus_client``, which your
    application serves. Call this once; it needs the extra ``metrics``.

    Example:
        count_sends(app)
    """
    require_prometheus()
    from prometheus_client import REGISTRY, Counter, Histogram

    registry = REGISTRY if registry is None else registry
    total, duration = PRODUCER
    sends = Counter(total.name, total.text, total.labels, registry=registry)
    seconds = Histogram(
        duration.name, duration.text, duration.labels, registry=registry, buckets=BOUNDS
    )
    names: set[str] = set()

    def observe(sent: Sent) -> None:
        if sent.task_name not in names and len(names) < NAMES_MAX:
            names.add(sent.task_name)
        name = sent.task_name if sent.task_name in names else OTHER
        sends.labels(sent.queue_name, name, sent.result).inc(sent.tasks)
        seconds.labels(sent.queue_name, name).observe(sent.seconds)

    app._producer.observers.append(observe)
