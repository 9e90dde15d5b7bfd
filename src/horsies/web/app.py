"""The dashboard's ASGI application: its route table, the gate in front of the routes, error pages.

Connections are opened, and the hub starts, on first use, because frameworks do not run the lifespan of a
mounted application.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from horsies.app import Horsies
from horsies.config.postgres import PostgresConfig
from horsies.database_url import mask_url
from horsies.db.statement import read_rows
from horsies.db.statements.monitor import list_queue_states, read_server
from horsies.tasks.recording import Action, Actor, log_action
from horsies.web import (
    actions,
    api,
    durable_actions,
    key_actions,
    metrics,
    orders,
    pages,
    pages_doctor,
    pages_edit,
    pages_explain,
    pages_failures,
    pages_names,
    pages_runs,
    pages_schedule_edit,
    pages_schedules,
    pages_search,
    pages_send,
    pages_tasks,
)
from horsies.web.access import (
    Access,
    AdaptedPolicy,
    CanPolicy,
    Policy,
    Signer,
    TokenPolicy,
    Verb,
    behind_proxy,
    is_allowed_host,
    is_same_site,
)
from horsies.web.hub import Hub
from horsies.web.reading import (
    BadRequest,
    Forbidden,
    NotFound,
    Problem,
    Unauthenticated,
    bounded_change,
    web_broker,
)
from horsies.web.rendering import (
    STATIC_TYPES,
    Page,
    RefusedForm,
    Route,
    RouteVerb,
    Settings,
    Site,
    View,
    environment,
    failure_of,
    render,
    static_files,
)

BODY_BYTES_MAX = 64 * 1024
URL_BYTES_MAX = 8 * 1024
SECRET_VARIABLE = "HORSIES_WEB_SECRET"  # noqa: S105
INTENT_HEADER = "x-horsies-intent"
ERROR_TITLES = {
    403: "Not allowed",
    404: "Not found",
    503: "Database unavailable",
    504: "Took too long",
}


async def help_page(view: View) -> Page:
    """Show the keyboard shortcuts, the terms, and the viewer's permissions."""
    return Page("help.html", "Help", {}, live_seconds=None)


ROUTES: tuple[Route, ...] = (
    *pages.ROUTES,
    *pages_tasks.ROUTES,
    *pages_failures.ROUTES,
    *pages_edit.ROUTES,
    *pages_names.ROUTES,
    *pages_send.ROUTES,
    *pages_runs.ROUTES,
    # A schedule's name may contain slashes, so match the longer paths first.
    *pages_explain.ROUTES,
    *pages_schedule_edit.ROUTES,
    *pages_schedules.ROUTES,
    *pages_doctor.ROUTES,
    *pages_search.ROUTES,
    *actions.ROUTES,
    *durable_actions.ROUTES,
    *key_actions.ROUTES,
    *orders.ROUTES,
    *api.ROUTES,
    *metrics.ROUTES,
    Route("GET", "/help", None, help_page),
)


def create_app(
    app: Horsies,
    *,
    policy: Policy,
    actions: bool = False,
    payload: bool = False,
    masked: Sequence[str] = (),
    links: Mapping[str, str] | None = None,
    frame_ancestors: str | None = None,
) -> Dashboard:
    """Return an application's dashboard as an ASGI application that can be mounted anywhere.

    ``policy`` decides who may view pages and make changes. ``actions`` enables changes; ``payload``
    shows arguments and results to users who may see them, with the values of keys that match ``masked``
    hidden. ``links`` has URL templates for other tools, such as
    ``{"logs": "https://…?task={task_id}"}``. ``frame_ancestors`` lists the sites that may embed the
    dashboard in a frame.

    Example:
        api.mount("/ops/horsies", create_app(app, policy=ViewOnly()))
    """
    settings = Settings(actions, payload, tuple(masked), links or {}, frame_ancestors)
    return build(app.config.broker, app, settings, policy)


def create_monitoring_app(
    app: Horsies,
    *,
    auth_policy: Policy | CanPolicy,
    config: Mapping[str, Any] | None = None,
    actions_enabled: bool = True,
) -> Dashboard:
    """Return the dashboard of ``create_app`` with changes enabled. The policy may also be an object with
    ``can_view`` and ``can_act``; ``config`` is passed on to ``create_app``.
    """
    policy: Policy = (
        cast(Policy, auth_policy) if hasattr(auth_policy, "access") else AdaptedPolicy(auth_policy)
    )
    return create_app(app, policy=policy, actions=actions_enabled, **(config or {}))


def build(
    database: PostgresConfig,
    app: Horsies | None,
    settings: Settings,
    policy: Policy,
    signer: Signer | None = None,
) -> Dashboard:
    """Assemble the parts of a dashboard for this database."""
    signer = signer or Signer(os.environ.get(SECRET_VARIABLE))
    site = Site(web_broker(database), app, settings, signer, environment())
    return Dashboard(site, policy)


class Dashboard:
    """The ASGI application, with one gate for all routes: it checks the host, the access, the verb and
    the origin, then calls the handler.
    """

    def __init__(self, site: Site, policy: Policy, routes: Sequence[Route] = ROUTES) -> None:
        self.site = site
        self.policy = policy
        self.routes = routes
        self.hub = Hub(site)
        self._app = with_headers(self._application(), site)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(behind_proxy(scope, self.site.settings.proxies), receive, send)

    def _application(self) -> Starlette:
        handlers: dict[Any, Any] = {Problem: self._show_problem, HTTPException: self._show_missing}
        routes = [
            StarletteRoute("/livez", _livez),
            StarletteRoute("/readyz", self._readyz),
            StarletteRoute("/static/{digest}/{name}", self._static),
            StarletteRoute("/login", self._login, methods=["GET", "POST"]),
            *(
                StarletteRoute(f"/live{route.path}", partial(self._live, route))
                for route in self.routes
                if route.method == "GET"
            ),
            *(
                StarletteRoute(route.path, partial(self._serve, route), methods=[route.method])
                for route in self.routes
            ),
        ]
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _serve(self, route: Route, request: Request) -> Response:
        view = await self._admit(route, request)
        if isinstance(view, Response):
            return view
        try:
            with bounded_change() if route.method == "POST" else nullcontext():
                answer = await route.handler(view)
            return render(view, answer) if isinstance(answer, Page) else answer
        except RefusedForm as refusal:
            return refusal.response
        except (Problem, HTTPException):
            raise
        except Exception as error:
            return self._error(request, failure_of(view, error))

    async def _live(self, route: Route, request: Request) -> Response:
        view = await self._admit(route, request)
        return view if isinstance(view, Response) else self.hub.stream(view, route.handler)

    async def _admit(self, route: Route, request: Request) -> View | Response:
        """Return the view of an admitted request, or the response that rejects the request."""
        self._require_host(request)
        access = await self.policy.access(request)
        if isinstance(access, Response):
            return access
        if access is None:
            return self._refuse_access(request)
        view = View(self.site, request, self._effective(access))
        request.state.access = view.access  # Used by this request's error page.
        if route.verb is None:
            return view
        view.body = await _bounded_body(request)
        try:
            verb = await self._require_right(route.verb, view)
            if route.method == "POST":
                await self._require_intent(verb, view)
                # A change may wait long for a lock, so detect a dead connection with a read before
                # the change.
                await view.read(read_rows(read_server()))
        except Forbidden as refusal:
            action, actor = Action(route.method.lower(), view.path), Actor(view.access.user, "web")
            log_action(action, actor, "forbidden", refusal.sentence)
            raise
        return view

    def _require_host(self, request: Request) -> None:
        if len(request.scope.get("query_string", b"")) > URL_BYTES_MAX:
            raise HTTPException(414, "The URL is longer than 8 KB.")
        if "\x00" in request.scope["path"]:
            raise BadRequest("The address contains NUL, which PostgreSQL cannot store.")
        host = request.headers.get("host", "")
        if not is_allowed_host(host, self.site.settings.allowed_hosts):
            sentence = f"The dashboard does not answer for this host; add --allowed-host {host!r}."
            raise HTTPException(421, sentence)

    def _refuse_access(self, request: Request) -> Response:
        if isinstance(self.policy, TokenPolicy):
            if _is_api(request):
                raise Unauthenticated("The header Authorization: Bearer, or a session, is missing.")
            page = Page("login.html", "Log in", {"was_wrong": False}, None, 401)
            return render(View(self.site, request, Access("")), page)
        raise Forbidden("You may not see this dashboard.")

    def _effective(self, access: Access) -> Access:
        settings = self.site.settings
        may = access.may if settings.actions else frozenset()
        return Access(access.user, may, access.sees_payload and settings.payload)

    async def _require_right(self, wanted: RouteVerb, view: View) -> Verb:
        if not self.site.settings.actions:
            switch = "--enable-actions" if self.site.settings.is_standalone else "actions=True"
            raise Forbidden(
                f"The dashboard is read-only; start it with {switch}.", code="ACTIONS_OFF"
            )
        verb = await wanted(view) if callable(wanted) else wanted
        if not view.may(verb):
            raise Forbidden(f"You lack the right {verb}.", code="NO_RIGHT", verb=verb)
        return verb

    async def _require_intent(self, verb: Verb, view: View) -> None:
        """Reject a change that was submitted by another site's page."""
        if not is_same_site(view.request):
            raise Forbidden("The request comes from another site.", code="CROSS_SITE")
        if _is_api(view.request):
            if view.request.headers.get(INTENT_HEADER) != "action":
                raise Forbidden("The header X-Horsies-Intent: action is missing.", code="NO_INTENT")
            return
        token = (await view.form()).get("token", "")
        if not self.site.signer.is_form_token(token, view.access.user, verb):
            raise Forbidden(
                "The form is out of date; reload the page and try again.", code="STALE_FORM"
            )

    async def _login(self, request: Request) -> Response:
        self._require_host(request)
        if (
            request.method != "POST"
        ):  # The user reopened the address to which a wrong token was posted.
            return View(self.site, request, Access("")).redirect("/")
        if not isinstance(self.policy, TokenPolicy):
            raise NotFound("There is no login here.")
        if not is_same_site(request):
            raise Forbidden("The request comes from another site.", code="CROSS_SITE")
        view = View(self.site, request, Access(""), await _bounded_body(request))
        if self.policy.is_right((await view.form()).get("secret", ""), request):
            return self.policy.logged_in(request, view.url("/"))
        return render(view, Page("login.html", "Log in", {"was_wrong": True}, None, 401))

    async def _readyz(self, request: Request) -> Response:
        try:
            await self.site.reader.read(read_rows(list_queue_states()))
        except Problem as problem:
            # Omit the sentence, because it may contain hosts and users, and a probe needs no
            # authentication.
            return PlainTextResponse(f"not ready: {problem.code}\n", 503)
        return PlainTextResponse("ready\n")

    async def _static(self, request: Request) -> Response:
        self._require_host(request)
        name = request.path_params["name"]
        if name not in STATIC_TYPES:
            raise NotFound(f"There is no file {name}.")
        data, digest = static_files()[name]
        is_current = request.path_params["digest"] == digest
        caching = "private, max-age=31536000, immutable" if is_current else "no-store"
        return Response(data, 200, {"Cache-Control": caching}, STATIC_TYPES[name])

    async def _show_problem(self, request: Request, error: Exception) -> Response:
        return self._error(request, cast(Problem, error))

    async def _show_missing(self, request: Request, error: Exception) -> Response:
        found = cast(HTTPException, error)
        problem = Problem(found.detail, code=f"HTTP_{found.status_code}")
        if found.status_code == 404:
            problem = NotFound(f"There is no page {request.url.path}.")
        problem.status = found.status_code
        return self._error(request, problem)

    def _error(self, request: Request, problem: Problem) -> Response:
        sentence = mask_url(problem.sentence)
        if _is_api(request):
            document = {
                "type": "about:blank",
                "title": sentence,
                "status": problem.status,
                "code": problem.code,
                **problem.members,
            }
            return JSONResponse(document, problem.status, media_type="application/problem+json")
        context = {
            "sentence": sentence,
            "code": problem.code,
            "status": problem.status,
            "explained_at": problem.members.get("explained_at"),
            "remedy": problem.members.get("remedy"),
        }
        title = ERROR_TITLES.get(problem.status, "Error")
        page = Page("error.html", title, context, None, problem.status)
        access = getattr(request.state, "access", Access(""))
        return render(View(self.site, request, access), page)


def _is_api(request: Request) -> bool:
    root = str(request.scope.get("root_path", "")).rstrip("/")
    return str(request.scope["path"]).removeprefix(root).startswith("/api/")


async def _bounded_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise HTTPException(413, "The body is larger than 64 KB.")
    return body


async def _livez(request: Request) -> Response:
    return PlainTextResponse("alive\n")


def with_headers(app: ASGIApp, site: Site) -> ASGIApp:
    """Add the security headers to every response of the application."""
    headers = security_headers(site.settings.frame_ancestors)

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in headers if name not in given]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await app(scope, receive, send_with)

    return wrapped


def security_headers(frame_ancestors: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers that restrict a browser to the dashboard's own files."""
    framing = frame_ancestors or "'none'"
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; "
        f"frame-ancestors {framing}; "
        "require-trusted-types-for 'script'; trusted-types horsies"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        # A form must send its origin, which "no-referrer" would replace with "null".
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()]
