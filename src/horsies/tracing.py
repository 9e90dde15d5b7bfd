"""OpenTelemetry spans for sends, starts, attempts and calls of steps. The context of a send is stored as
a carrier in the task's options, under the key "trace". Only the creation of a span imports
opentelemetry, and without ``AppConfig(tracing=...)`` no span is created. The application provides the
SDK, its sampler and its exporters; ``install`` sets them up in every process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from horsies._version import __version__
from horsies.current_task import CurrentTask, current_task
from horsies.failure_fingerprint import error_type

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, SpanContext, TracerProvider

CARRIER_BYTES_MAX = 1_024
FLUSH_MS = 2_000
# Keys that Horsies adds to the propagator's carrier: "later" marks a task that was not sent to run
# immediately, and the second key has the span of the previous attempt.
LATER, PREVIOUS = "later", "previous"
# The keys to drop from a carrier that is too large, in this order.
_DISPENSABLE = ("baggage", "tracestate")
_SYSTEM = {"messaging.system": "horsies"}

_make_provider: Callable[[], TracerProvider] | None = None
_provider: TracerProvider | None = None


class _Settings(Protocol):
    """The fields of ``TracingConfig``."""

    @property
    def parent(self) -> str: ...
    @property
    def baggage(self) -> bool: ...


def install(provider_factory: Callable[[], TracerProvider]) -> None:
    """Set the tracer provider for this process and for every worker child.

    A provider has threads, which do not survive a fork, so the factory is called once in each process;
    in a child, it is called before the first task. When a child stops, its spans are flushed for at most
    two seconds.

    Example:
        def make_provider() -> TracerProvider:
            provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            return provider

        horsies.tracing.install(make_provider)
    """
    global _make_provider
    _make_provider = provider_factory
    # The parent process of children imports the application too; each child calls start_in_child
    # instead.
    if os.environ.get("HORSIES_CHILD_PROCESS") != "1":
        _set_provider()


def is_installed() -> bool:
    """Return whether the application has called ``install``."""
    return _make_provider is not None


def start_in_child() -> None:
    """Create the provider for a new child process.

    A child that was forked directly from its worker keeps the worker's provider, which cannot be
    replaced; the SDK restarts its batch processors' threads after a fork.
    """
    if _provider is None:
        _set_provider()


def stop_in_child() -> None:
    """Export the spans of a child process before it ends."""
    if _provider is not None:
        flush: Any = getattr(_provider, "force_flush", None)
        if flush is not None:
            flush(FLUSH_MS)


def _set_provider() -> None:
    from opentelemetry import trace

    global _provider
    assert _make_provider is not None
    _provider = _make_provider()
    trace.set_tracer_provider(_provider)


class Sending:
    """The span of one send or start, and the carrier to store with its tasks."""

    __slots__ = ("_span", "carrier")

    def __init__(
        self,
        settings: _Settings,
        name: str,
        attributes: Mapping[str, str | int],
        *,
        is_later: bool = False,
        is_root: bool = False,
    ) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.context import Context

        tracer = trace.get_tracer("horsies", __version__)
        operation = name.split(" ", 1)[0]
        self._span = tracer.start_span(
            name,
            context=Context() if is_root else None,
            kind=trace.SpanKind.PRODUCER,
            attributes={
                **_SYSTEM,
                "messaging.operation.name": operation,
                "messaging.operation.type": "send",
                **attributes,
            },
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        self.carrier = stored_carrier(carrier, keeps_baggage=settings.baggage)
        if is_later:
            self.carrier[LATER] = "1"

    def end(self, error_code: str | None = None) -> None:
        """End the span, with the error's code if nothing was stored."""
        if error_code is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error_code)
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def current_carrier(settings: _Settings) -> dict[str, str]:
    """Return the carrier of the current span, for a sub-workflow's tasks."""
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return stored_carrier(carrier, keeps_baggage=settings.baggage)


def stored_carrier(carrier: Mapping[str, str], *, keeps_baggage: bool) -> dict[str, str]:
    """Return a carrier in the form in which it is stored: without unwanted baggage, and not too large."""
    kept = {name: text for name, text in carrier.items() if keeps_baggage or name != "baggage"}
    for name in _DISPENSABLE:
        if _size(kept) > CARRIER_BYTES_MAX:
            kept.pop(name, None)
    return kept if _size(kept) <= CARRIER_BYTES_MAX else {}


def _size(carrier: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(text.encode()) for name, text in carrier.items())


def with_carrier(options_json: str, carrier: Mapping[str, str]) -> str:
    """Return stored task options with a carrier; the options must be a JSON object with other members."""
    if not carrier:
        return options_json
    text = json.dumps(dict(carrier), separators=(",", ":"))
    return f'{options_json[:-1]},"trace":{text}}}'


def with_previous(options_json: str | None, traceparent: str) -> str:
    """Return stored task options with the span of the previous attempt. Text from a manual edit stays
    unchanged.
    """
    try:
        options = json.loads(options_json or "{}")
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        return options_json or ""
    carrier = options.get("trace")
    options["trace"] = {**(carrier if isinstance(carrier, dict) else {}), PREVIOUS: traceparent}
    return json.dumps(options, separators=(",", ":"))


def carrier_of(task: CurrentTask) -> Mapping[str, str]:
    """Return the carrier with which the task was sent; ignore any other text in its place."""
    found = task.options.get("trace")
    if not isinstance(found, dict):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def is_child(parent: str, task: CurrentTask, carrier: Mapping[str, str]) -> bool:
    """Return whether an attempt's span is a child of the send's span, which it is not if the trace could
    last for days.
    """
    if parent != "auto":
        return parent == "always"
    return task.attempt == 1 and LATER not in carrier and task.schedule_name is None


class Processing:
    """The span of one attempt, created in the child around the task, or in the parent for a crashed or
    stopped attempt.
    """

    __slots__ = ("_context", "_raised", "_span", "_token")

    def __init__(
        self,
        settings: _Settings,
        task: CurrentTask,
        attributes: Mapping[str, str | int],
        started_at: float | None = None,
    ) -> None:
        from opentelemetry import propagate, trace

        carrier = carrier_of(task)
        sent = propagate.extract(carrier)
        links = [*_links(trace.get_current_span(sent).get_span_context(), "send")]
        if PREVIOUS in carrier:
            before = propagate.extract({"traceparent": carrier[PREVIOUS]})
            links += _links(trace.get_current_span(before).get_span_context(), "attempt")
        if not is_child(settings.parent, task, carrier):
            sent = trace.set_span_in_context(trace.INVALID_SPAN, sent)
        tracer = trace.get_tracer("horsies", __version__)
        self._span: Span = tracer.start_span(
            f"process {task.name}",
            context=sent,
            kind=trace.SpanKind.CONSUMER,
            attributes={**_attributes(task), **attributes},
            links=links,
            start_time=None if started_at is None else int(started_at * 1e9),
        )
        self._context = trace.set_span_in_context(self._span, sent)
        self._token: Any = None
        # The class of the exception that the task's code raised.
        self._raised: str | None = None

    @property
    def traceparent(self) -> str:
        """The span as a W3C traceparent header."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def attach(self) -> None:
        """Make the span current in this thread until the attempt ends."""
        from opentelemetry import context

        self._token = context.attach(self._context)

    def detach(self) -> None:
        """Make the previous span current again."""
        from opentelemetry import context

        if self._token is not None:
            context.detach(self._token)

    def around(self, task: CurrentTask) -> Iterator[None]:
        """Make the span current in the context of the task's code, because a coroutine has its own
        context.
        """
        from opentelemetry import context

        token = context.attach(self._context)
        try:
            yield
        except Exception as error:
            self._span.record_exception(error)
            self._raised = error_type(error)
            raise
        finally:
            context.detach(token)

    def end(
        self, error_code: str | None = None, message: str | None = None, *, will_retry: bool = False
    ) -> None:
        """End the span; set its status to ERROR only for a final error."""
        from opentelemetry.trace import Status, StatusCode

        if error_code is not None:
            self._span.set_attribute("error.type", self._raised or error_code)
            self._span.set_attribute("horsies.error_code", error_code)
            self._span.set_attribute("horsies.will_retry", will_retry)
            if not will_retry:
                self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.end()
        self.detach()


@contextmanager
def step_span(name: str) -> Iterator[None]:
    """Create the span of one call of a step's function, as a child of the attempt's span. Replayed steps
    have no span.
    """
    from opentelemetry import trace

    tracer = trace.get_tracer("horsies", __version__)
    attributes = {"horsies.step": name, "horsies.task.id": current_task().id}
    with tracer.start_as_current_span(
        f"step {name.partition('#')[0]}", attributes=attributes, set_status_on_exception=False
    ) as span:
        try:
            yield
        except Exception as error:
            span.set_attribute("error.type", error_type(error) or "TaskFailed")
            span.set_status(trace.StatusCode.ERROR)
            raise


def _links(context: SpanContext, kind: str) -> list[Link]:
    from opentelemetry.trace import Link

    return [Link(context, {"horsies.link": kind})] if context.is_valid else []


def _attributes(task: CurrentTask) -> dict[str, str | int]:
    values: dict[str, str | int | None] = {
        **_SYSTEM,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": task.queue,
        "messaging.message.id": task.id,
        "horsies.task.name": task.name,
        "horsies.attempt": task.attempt,
        "horsies.wait_ms": _wait_ms(task),
        "horsies.workflow.id": task.workflow_id,
        "horsies.workflow.node": task.node_id,
        "horsies.schedule.name": task.schedule_name,
    }
    return {name: value for name, value in values.items() if value is not None}


def _wait_ms(task: CurrentTask) -> int | None:
    if task.enqueued_at is None:
        return None
    seconds = (task.started_at - task.enqueued_at).total_seconds()
    return max(0, round(seconds * 1000))


def killed_span(
    settings: _Settings,
    task: CurrentTask,
    attributes: Mapping[str, str | int],
    error_code: str,
    message: str,
    *,
    will_retry: bool,
) -> str:
    """Create the span of an attempt that its child could not finish, and return its traceparent."""
    started_at = task.started_at.timestamp()
    span = Processing(settings, task, attributes, min(started_at, time.time()))
    span.end(error_code, message, will_retry=will_retry)
    return span.traceparent
