"""Spans of steps: one for each call of a step's function, below the span of the attempt."""

from __future__ import annotations

from datetime import timedelta

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from horsies import AsyncDurable, Durable, Horsies, StepFailed, TracingConfig
from horsies.testing import clock_of, run_pending
from tests.support.spans import provider as provider
from tests.support.spans import spans as spans


def fail() -> None:
    raise OSError("no route")


def test_each_call_of_a_step_has_a_span_and_a_replay_has_none(
    app: Horsies, spans: InMemorySpanExporter
) -> None:
    app.config = app.config.model_copy(update={"tracing": TracingConfig()})

    @app.durable("traced")
    def traced(ctx: Durable) -> None:
        ctx.step(abs, -1)
        ctx.gather(ctx.call(abs, -2))
        with pytest.raises(StepFailed):
            ctx.step(fail)
        ctx.sleep(timedelta(days=1))

    @app.durable("awaited")
    async def awaited(ctx: AsyncDurable) -> None:
        await ctx.step(abs, -1)

    traced.enqueue()
    awaited.enqueue()
    run_pending(app)
    clock_of(app).advance(timedelta(days=2))
    run_pending(app)
    found = [one for one in spans.get_finished_spans() if one.name.startswith("step ")]
    assert sorted(one.name for one in found) == ["step abs", "step abs", "step abs", "step fail"]
    attempts = {
        one.context.span_id: one.name
        for one in spans.get_finished_spans()
        if one.name.startswith("process ")
    }
    assert all(one.parent is not None and one.parent.span_id in attempts for one in found)
    (failed,) = [one for one in found if one.name == "step fail"]
    assert dict(failed.attributes or {})["error.type"] == "OSError"
    assert {dict(one.attributes or {})["horsies.step"] for one in found} == {"abs", "abs#2", "fail"}
