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
    """Whether the span of an attempt is a child of the span of its send. "auto": the first attempt of
    a task that was sent to run at once, and of a node of a workflow; "always": every attempt; "never":
    none. In any case it links to the send. Defaults to "auto"."""

    baggage: bool = False
    """Whether the baggage of the sender is stored with the task and restored around it. Defaults to
    False."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # find_spec of a submodule imports the package, which is an empty namespace here.
        if find_spec("opentelemetry") is None or find_spec("opentelemetry.trace") is None:
            raise ConfigurationError(
                "TracingConfig needs the package opentelemetry-api, which is not installed.",
                code=ErrorCode.CONFIG_MISSING_EXTRA,
                help_text="pip install '/path/to/horsies[otel]'",
            )
        return self
