"""Pages: a handler's input (``View``), its return value (``Page``), its ``Route``, and the conversion to
HTML.

A module with handlers ends with a table of routes, ``ROUTES``.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from hashlib import sha256
from importlib.resources import files
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl, quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from horsies._version import __version__
from horsies.app import Horsies
from horsies.db.statement import Script
from horsies.tasks.broker import PostgresBroker
from horsies.web.access import Access, Networks, Signer, Verb, set_cookie
from horsies.web.masking import Masking, visible
from horsies.web.reading import BadRequest, Problem, Reader
from horsies.web.words import FILTERS

T = TypeVar("T")

logger = logging.getLogger("horsies.web")

NOTICE_COOKIE = "horsies_notice"
NOTICE_SECONDS = 60
STATIC_TYPES = {"horsies.css": "text/css", "horsies.js": "text/javascript"}

# The navigation: the key to press after "g", the path, and the label.
NAVIGATION = (
    ("o", "/", "Overview"),
    ("q", "/queues", "Queues"),
    ("t", "/tasks", "Tasks"),
    ("f", "/failures", "Failures"),
    ("r", "/workflows", "Workflows"),
    ("w", "/workers", "Workers"),
    ("s", "/schedules", "Schedules"),
    ("d", "/doctor", "Doctor"),
    ("h", "/history", "History"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """One dashboard's switches."""

    actions: bool = False
    payload: bool = False
    masked: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    frame_ancestors: str | None = None
    # The host names that requests may use; None accepts all names, if the mounting server checks
    # them.
    allowed_hosts: frozenset[str] | None = None
    # The proxies whose X-Forwarded-Proto and X-Forwarded-For are trusted; the server of a mounting
    # application has its own settings for them.
    proxies: Networks = ()
    # Whether the process serves the dashboard alone, as ``horsies web`` does.
    is_standalone: bool = False
    # How the viewer is authenticated, for the help page.
    authentication: str = "policy of the application"
    # The names of all databases that the process shows, and the name of this database; empty on the
    # list of databases.
    databases: tuple[str, ...] = ()
    database: str = ""


@dataclass
class Site:
    """One dashboard: its database, application, switches, secret and templates."""

    broker: PostgresBroker
    app: Horsies | None
    settings: Settings
    signer: Signer
    templates: Environment
    # The placeholder of a form's token in rendered text. Each viewer's own token replaces it last,
    # so that viewers can share rendered regions.
    token_marker: str = field(default_factory=lambda: f"token-{secrets.token_hex(16)}-")

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.broker)

    @property
    def queue_caps(self) -> dict[str, int | None]:
        """The application's queues with their caps; empty without an application."""
        queues = self.app.config.queues() if self.app else ()
        return {queue.name: queue.max_concurrency for queue in queues}

    @cached_property
    def masking(self) -> Masking:
        """Masks the values of secret keys: the built-in list and those passed to the dashboard."""
        return Masking(self.settings.masked)

    def parameter_names(self, task_name: str) -> Sequence[str]:
        """Return a task's positional parameters, or none if no application defines the task."""
        task = self.app.get_task(task_name) if self.app else None
        return task.definition.signature.names.positional if task else ()

    def with_tokens(self, text: str, user: str) -> str:
        """Replace the form markers with this user's tokens."""
        marked = self.token_marker + r"(\w+)"
        return re.sub(marked, lambda found: self.signer.form_token(user, found[1]), text)


@dataclass
class View:
    """One request, with the objects that its handler may use."""

    site: Site
    request: Request
    access: Access
    body: bytes = b""

    @property
    def params(self) -> Mapping[str, str]:
        return self.request.path_params

    @property
    def query(self) -> QueryParams:
        """The URL's query with every filter of the page."""
        return self.request.query_params

    @property
    def path(self) -> str:
        """The page's path below the mount point, which is also the path of its update stream."""
        path: str = self.request.scope["path"]
        is_below = path.startswith(f"{self._root}/")
        below = path[len(self._root) :] if is_below else path if path != self._root else "/"
        return below.removeprefix("/live") if below.startswith("/live/") else below

    @property
    def _root(self) -> str:
        root: str = self.request.scope.get("root_path", "")
        return root.rstrip("/")

    async def read(self, script: Script[T]) -> T:
        """Run a script in one short read-only transaction.

        Raises ``TookTooLong`` at the time limit and ``Unavailable`` if the database cannot be reached.
        """
        return await self.site.reader.read(script)

    def url(self, path: str) -> str:
        """Return the absolute path of a page, below the mount point."""
        return self._root + quote(path, safe="/?&=%:@,+~;#")

    def may(self, verb: Verb) -> bool:
        """Whether this user may make this change; always False while changes are disabled."""
        return verb in self.access.may

    async def form(self) -> dict[str, str]:
        """Return a posted form's fields; of a repeated field, return the last value."""
        return dict(parse_qsl(self.body.decode(errors="replace"), keep_blank_values=True))

    async def json(self) -> Any:
        """Return the JSON body of an ``/api`` request, or an empty object for an empty body."""
        try:
            return json.loads(self.body or b"{}")
        except (ValueError, RecursionError) as error:
            raise BadRequest("The body is not JSON.") from error

    def redirect(self, path: str, notice: str | None = None) -> Response:
        """Redirect to a page after a change; the page shows the notice one time."""
        response = RedirectResponse(self.url(path), 303)
        if notice:
            sealed = self.site.signer.sealed("notice", notice, NOTICE_SECONDS)
            set_cookie(response, self.request, NOTICE_COOKIE, sealed, NOTICE_SECONDS)
        return response

    def notice(self) -> str | None:
        sealed = self.request.cookies.get(NOTICE_COOKIE)
        return self.site.signer.opened("notice", sealed) if sealed else None


@dataclass
class Page:
    """A template with its context. ``live_seconds`` is the pause between updates; None means no updates."""

    template: str
    title: str
    context: dict[str, Any]
    live_seconds: float | None = 2.0
    status: int = 200


class RefusedForm(Exception):
    """A refused change of a form; the response redirects to a page with the reason."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


Handler = Callable[[View], Awaitable[Page | Response]]
# The verb of a path; for bulk orders, it is read from the request.
RouteVerb = Verb | Callable[[View], Awaitable[Verb]]


@dataclass(frozen=True, slots=True)
class Route:
    """A path with its handler. Without a verb, the path needs only the permission to view; a POST always
    has a verb, and a GET that prepares a change has the change's verb.

    The gate checks the host, the access, the verb and the origin before it calls the handler.
    """

    method: Literal["GET", "POST"]
    path: str
    verb: RouteVerb | None
    handler: Handler

    def __post_init__(self) -> None:
        if self.method == "POST" and self.verb is None:
            raise ValueError(f"POST {self.path} needs a verb")


class _AsStored(Markup):
    """The value of a form field, which keeps its characters because the browser sends it back."""


def _finalized(value: object) -> object:
    """Make control and direction characters visible in every text and drawing on a page."""
    if not isinstance(value, str) or isinstance(value, _AsStored) or value.isprintable():
        return value
    return Markup(visible(value)) if isinstance(value, Markup) else visible(value)  # noqa: S704


@cache
def environment() -> Environment:
    """Return the template environment; filters come from ``words``."""
    made = Environment(
        loader=PackageLoader("horsies.web"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_finalized,
    )
    made.filters.update(FILTERS)
    made.filters.update(visible=visible, as_stored=lambda text: _AsStored(escape(text)))
    made.globals.update(version=__version__, navigation=NAVIGATION)
    return made


@cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the digest of each static file."""
    folder = files("horsies.web").joinpath("static")
    contents = {name: folder.joinpath(name).read_bytes() for name in STATIC_TYPES}
    return {name: (data, sha256(data).hexdigest()[:16]) for name, data in contents.items()}


def context_of(view: View, page: Page) -> dict[str, Any]:
    site, is_live, here = view.site, page.live_seconds is not None, quote(view.path)

    def token(verb: Verb) -> str:
        return f"{site.token_marker}{verb}"

    def csrf(verb: Verb) -> Markup:
        return Markup('<input type="hidden" name="token" value="{}">').format(token(verb))

    def static(name: str) -> str:
        return view.url(f"/static/{static_files()[name][1]}/{name}")

    return {
        "url": view.url,
        "csrf": csrf,
        "token": token,
        "may": view.may,
        "static": static,
        "access": view.access,
        "settings": site.settings,
        "title": page.title,
        "path": view.path,
        "query": view.query,
        "here": view.url(here) + _query(view),
        "databases": _databases(view),
        "live_url": view.url(f"/live{here}") + _query(view) if is_live else None,
        "notice": None,
        **page.context,
    }


def _databases(view: View) -> list[tuple[str, str]]:
    """Return the address of the list of all databases, and the address of each; return nothing for a
    single database.
    """
    settings = view.site.settings
    if not settings.databases:
        return []
    root = view.url("").removesuffix(f"/db/{settings.database}" if settings.database else "")
    addresses = [(name, f"{root}/db/{name}/") for name in settings.databases]
    return [("", f"{root}/"), *addresses]


def _query(view: View) -> str:
    return f"?{view.request.url.query}" if view.request.url.query else ""


def render(view: View, page: Page) -> Response:
    notice = view.notice()
    context = {**context_of(view, page), "notice": notice}
    text = view.site.templates.get_template(page.template).render(context)
    response = HTMLResponse(view.site.with_tokens(text, view.access.user), page.status)
    if notice is not None:
        response.delete_cookie(NOTICE_COOKIE, path=view.request.scope.get("root_path") or "/")
    return response


def failure_of(view: View, error: Exception) -> Problem:
    """Log an unexpected error, and return the problem to show for it."""
    logger.error("the page %s failed", view.path, exc_info=error)
    kind = type(error).__name__
    return Problem(f"The page failed with {kind}; the log of the dashboard has the traceback.")


def render_regions(view: View, page: Page) -> dict[str, str]:
    """Return the text of each live region, with placeholders of form tokens."""
    template = view.site.templates.get_template(page.template)
    context = template.new_context(context_of(view, page))
    # Run the template up to its first text, which defines the base template's macros and variables.
    next(template.root_render_func(context), None)
    names = [name for name in template.blocks if name.startswith("region_")]
    return {name.removeprefix("region_"): "".join(template.blocks[name](context)) for name in names}
