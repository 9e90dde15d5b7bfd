"""An application with optional tracing, set by the environment; its spans are written to a file, one per
line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from horsies import Horsies, RetryPolicy, TaskFailed, current_task, from_node, tracing
from tests.support.apps.programs import read_config
from tests.support.span_file import SPANS_VARIABLE, file_provider

app = Horsies(read_config())


def make_provider() -> Any:
    """The provider exports late, so that only a flush exports the spans of a child."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return file_provider(
        lambda exporter: BatchSpanProcessor(exporter, schedule_delay_millis=600_000)
    )


if os.environ.get(SPANS_VARIABLE):
    tracing.install(make_provider)


@app.task("look")
def look() -> str:
    """Return the trace of the task's code."""
    from opentelemetry import trace

    current_task().logger.warning("looking")
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


@app.task("look_async")
async def look_async() -> str:
    from opentelemetry import trace

    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


@app.task("request")
def request() -> list[str]:
    """Send tasks inside a span of the application."""
    from opentelemetry import trace

    with trace.get_tracer("shop").start_as_current_span("request"):
        sent = [look.send(), look_async.send(), look.schedule(0.05)]
    handles = [one.unwrap() for one in sent]
    handles += look.send_many([look.bind(), look.bind()]).unwrap()
    return [handle.task_id for handle in handles]


@app.task("again", retry_policy=RetryPolicy.fixed([0.05], auto_retry_for=["AGAIN"]))
def again() -> int:
    """Fail once."""
    if current_task().attempt == 1:
        raise TaskFailed("AGAIN", "not yet")
    return current_task().attempt


@app.task("die")
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task("stay", timeout_ms=300)
def stay() -> None:
    """Wait until the time limit stops the task."""
    time.sleep(60)


@app.task("double")
def double(value: int) -> int:
    return 2 * value


@app.task("run_flow")
def run_flow() -> str:
    """Start a run with two nodes."""
    first = double.node(node_id="first")(value=1)
    second = double.node(node_id="second")(value=from_node(first))
    spec = app.workflow(
        name="pair", definition_key="traced.pair", tasks=[first, second], output=second
    )
    return spec.start().unwrap().workflow_id


@app.task("modules")
def modules() -> list[str]:
    """Return the modules of OpenTelemetry that this process has imported."""
    return [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]
