"""Spans of a worker's processes, exported one per line to a file named in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SPANS_VARIABLE = "HORSIES_E2E_SPANS"


def file_provider(processor: Callable[[Any], Any]) -> Any:
    """Return a provider that exports each span to the file with this processor."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    target = Path(os.environ[SPANS_VARIABLE]).open("a")  # noqa: SIM115
    exporter = ConsoleSpanExporter(
        out=target, formatter=lambda span: f"{span.to_json(indent=None)}\n"
    )
    provider = TracerProvider()
    provider.add_span_processor(processor(exporter))
    return provider


class Span(NamedTuple):
    """The facts of one exported span."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str | None
    links: dict[str, str]
    status: str
    attributes: dict[str, Any]
    events: list[str]

    @property
    def traceparent(self) -> str:
        """The W3C header without its flags."""
        return f"00-{self.trace}-{self.id}"


def read_spans(path: Path) -> list[Span]:
    spans = []
    # The text after the last line feed is incomplete.
    written, _, _ = path.read_text().rpartition("\n")
    for line in written.splitlines():
        found = json.loads(line)
        context, parent = found["context"], found["parent_id"]
        spans.append(
            Span(
                found["name"],
                found["kind"].removeprefix("SpanKind."),
                context["trace_id"].removeprefix("0x"),
                context["span_id"].removeprefix("0x"),
                parent and parent.removeprefix("0x"),
                {
                    link["attributes"]["horsies.link"]: link["context"]["span_id"].removeprefix(
                        "0x"
                    )
                    for link in found["links"]
                },
                found["status"]["status_code"],
                found["attributes"],
                [event["name"] for event in found["events"]],
            )
        )
    return spans
