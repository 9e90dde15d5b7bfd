"""The configuration of OpenTelemetry spans."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Self

from pydantic import model_validator

from horsies.errors import ConfigurationError, ErrorCode
from horsies.validation import FrozenModel


class TracingConfig(FrozenModel):
    """OpenTelemetry spans for sends, starts and attempts. Needs the extra `otel`.

    Example:
        AppConfig(broker=PostgresConfig.from_env(), tracing=TracingConfig())
    """

    parent: Literal["auto", "always", "never"] = "auto"
    """Which attempts have a span that is a child of the send's span. With "auto", it is the first
    attempt of a task that was sent to run immediately, or of a workflow node; with "always", every
    attempt; with "never", no attempt. Every attempt's span has a link to the send. Defaults to "auto".
    """

    baggage: bool = False
    """Whether the sender's baggage is stored with the task and restored while it runs. Defaults to False."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # find_spec imports the parent package, and the parent, opentelemetry, is an empty
        # namespace.
        if find_spec("opentelemetry") is None or find_spec("opentelemetry.trace") is None:
            raise ConfigurationError(
                "TracingConfig needs the package opentelemetry-api, which is not installed.",
                code=ErrorCode.CONFIG_MISSING_EXTRA,
                help_text="pip install '/path/to/horsies[otel]'",
            )
        return self
