"""One route of the dashboard. A module with handlers ends with a table of them, ``ROUTES``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starlette.responses import Response

from horsies.web.access import Verb
from horsies.web.rendering import Page, View

Handler = Callable[[View], Awaitable[Page | Response]]
# The verb of a path; that of a bulk order is part of its request.
RouteVerb = Verb | Callable[[View], Awaitable[Verb]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path with its handler. Without a verb it needs the right to look; a POST always has a verb.

    The gate checks the host, the access, the verb and the origin before it calls the handler.
    """

    method: Literal["GET", "POST"]
    path: str
    verb: RouteVerb | None
    handler: Handler

    def __post_init__(self) -> None:
        if self.method == "POST" and self.verb is None:
            raise ValueError(f"POST {self.path} needs a verb")
