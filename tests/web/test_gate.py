"""The gate: host, access, right, origin and token of every request, before a handler runs."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest
from starlette.authentication import SimpleUser
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse, Response

from horsies.web import (
    VERBS,
    Access,
    AllowAll,
    BasicPolicy,
    TokenPolicy,
    TrustedHeader,
    ViewOnly,
    hash_password,
)
from horsies.web.access import LOOPBACK_NAMES, AdaptedPolicy, Policy, Signer, Verb, parse_networks
from horsies.web.app import Dashboard
from tests.support.web_site import dashboard_of

TOKEN = "t" * 32
HERE = {"origin": "http://localhost", "sec-fetch-site": "same-origin"}


def ask(
    dashboard: Dashboard,
    path: str,
    method: str = "GET",
    client: str = "127.0.0.1",
    cookies: dict[str, str] | None = None,
    **request: Any,
) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(dashboard, client=(client, 1))
        base = "http://localhost"
        async with httpx.AsyncClient(transport=transport, base_url=base, cookies=cookies) as http:
            return await http.request(method, path, **request)

    return asyncio.run(main())


def form_token(dashboard: Dashboard, user: str = "anna", verb: Verb = "pause_queue") -> str:
    return dashboard.site.signer.form_token(user, verb)


def post(
    dashboard: Dashboard, headers: dict[str, str] | None = None, **form: str
) -> httpx.Response:
    return ask(dashboard, "/pause", "POST", headers=HERE if headers is None else headers, data=form)


def code_of(answer: httpx.Response) -> str:
    found: str = answer.text.split('<p class="muted">')[1].split("</p>")[0]
    return found


def test_a_change_with_right_origin_and_token_passes_and_shows_its_notice_once() -> None:
    dashboard = dashboard_of(actions=True)
    answer = post(dashboard, token=form_token(dashboard))
    assert (answer.status_code, answer.headers["location"]) == (303, "/counter")
    shown = ask(dashboard, "/counter", cookies=dict(answer.cookies))
    assert "paused &lt;b&gt;mail&lt;/b&gt;" in shown.text
    assert 'horsies_notice=""' in shown.headers["set-cookie"]


@pytest.mark.parametrize(
    ("headers", "token", "code"),
    [
        (HERE, "", "403 STALE_FORM"),
        (HERE, "x" * 43, "403 STALE_FORM"),
        ({**HERE, "origin": "https://evil.example"}, None, "403 CROSS_SITE"),
        ({**HERE, "origin": "null"}, None, "403 CROSS_SITE"),
        ({"sec-fetch-site": "cross-site"}, None, "403 CROSS_SITE"),
        ({"sec-fetch-site": "same-site"}, None, "403 CROSS_SITE"),
        ({"origin": "http://localhost:81"}, None, "403 CROSS_SITE"),
    ],
)
def test_a_change_from_elsewhere_is_refused(
    headers: dict[str, str], token: str | None, code: str
) -> None:
    dashboard = dashboard_of(actions=True)
    answer = post(dashboard, headers, token=form_token(dashboard) if token is None else token)
    assert code_of(answer) == code


def test_a_token_serves_one_user_and_one_verb() -> None:
    dashboard = dashboard_of(actions=True)
    for token in (form_token(dashboard, user="bert"), form_token(dashboard, verb="ping")):
        assert code_of(post(dashboard, token=token)) == "403 STALE_FORM"


def test_a_token_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = dashboard_of(actions=True)
    token = form_token(dashboard)
    monkeypatch.setattr("time.time", lambda: 1e12)
    assert code_of(post(dashboard, token=token)) == "403 STALE_FORM"


def test_actions_are_off_unless_switched_on() -> None:
    dashboard = dashboard_of()
    answer = post(dashboard, token=form_token(dashboard))
    assert code_of(answer) == "403 ACTIONS_OFF"
    assert "actions=True" in answer.text
    assert "<form method" not in ask(dashboard, "/help").text


def test_an_api_change_needs_the_header_of_intent() -> None:
    dashboard = dashboard_of(actions=True)
    assert ask(dashboard, "/api/pause", "POST").json()["code"] == "NO_INTENT"
    intent = {"X-Horsies-Intent": "action"}
    assert ask(dashboard, "/api/pause", "POST", headers=intent).text == "done"
    foreign = {**intent, "origin": "https://evil.example"}
    assert ask(dashboard, "/api/pause", "POST", headers=foreign).json()["code"] == "CROSS_SITE"


def test_a_body_of_more_than_64_kb_is_refused() -> None:
    answer = ask(dashboard_of(actions=True), "/pause", "POST", content=b"x" * 70_000)
    assert answer.status_code == 413


def test_a_host_outside_the_list_is_421_except_for_probes() -> None:
    dashboard = dashboard_of(allowed_hosts=frozenset(LOOPBACK_NAMES))
    for host in ("evil.example", "evil.example:8600", "localhost.evil.example", ""):
        assert ask(dashboard, "/counter", headers={"host": host}).status_code == 421
    for host in ("localhost", "LOCALHOST:8600", "127.0.0.1:8600", "[::1]:8600"):
        assert ask(dashboard, "/counter", headers={"host": host}).status_code == 200
    assert ask(dashboard, "/livez", headers={"host": "10.2.3.4"}).text == "alive\n"


def test_the_case_of_an_allowed_host_does_not_matter() -> None:
    dashboard = dashboard_of(allowed_hosts=frozenset({"Ops.Example"}))
    for host in ("ops.example", "OPS.example:8600"):
        assert ask(dashboard, "/counter", headers={"host": host}).status_code == 200


def test_the_browser_may_load_nothing_from_elsewhere() -> None:
    for path in ("/counter", "/nothing", "/static/0/horsies.css", "/livez", "/api/nothing"):
        headers = ask(dashboard_of(), path).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    framed = ask(dashboard_of(frame_ancestors="https://ops.example"), "/counter")
    assert "frame-ancestors https://ops.example;" in framed.headers["content-security-policy"]


def test_static_files_are_cached_for_ever_under_their_digest() -> None:
    dashboard = dashboard_of()
    page = ask(dashboard, "/counter").text
    for attribute in ('rel="stylesheet" href="', '<script src="'):
        path = page.split(attribute)[1].split('"')[0]
        answer = ask(dashboard, path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert ask(dashboard, "/static/0/passwords").status_code == 404


def connection_of(client: str = "127.0.0.1", **headers: str) -> HTTPConnection:
    scope = {
        "type": "http",
        "path": "/",
        "query_string": b"",
        "client": (client, 1),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    return HTTPConnection(scope)


def access_of(
    policy: Policy, client: str = "127.0.0.1", **headers: str
) -> Access | Response | None:
    return asyncio.run(policy.access(connection_of(client, **headers)))


def test_a_trusted_header_counts_only_from_its_proxy() -> None:
    policy = TrustedHeader("remote-user", allow_actions=["anna"], proxies=["10.0.0.0/8"])
    assert access_of(policy, "10.1.1.1", **{"remote-user": "anna"}) == Access("anna", VERBS, True)
    assert access_of(policy, "10.1.1.1", **{"remote-user": "bert"}) == Access("bert")
    assert access_of(policy, "192.168.1.1", **{"remote-user": "anna"}) is None
    assert access_of(policy, "10.1.1.1") is None


def test_a_policy_may_refuse_or_send_to_its_own_login() -> None:
    class Stranger:
        async def access(self, request: HTTPConnection) -> None:
            return None

    class Login:
        async def access(self, request: HTTPConnection) -> Response:
            return RedirectResponse("/login-of-the-site", 303)

    assert code_of(ask(dashboard_of(Stranger()), "/counter")) == "403 FORBIDDEN"
    answer = ask(dashboard_of(Login()), "/counter")
    assert answer.headers["location"] == "/login-of-the-site"


def test_view_only_sees_pages_without_forms_and_changes_nothing() -> None:
    dashboard = dashboard_of(ViewOnly(), actions=True, payload=True)
    assert "hidden" in ask(dashboard, "/help").text
    assert code_of(post(dashboard, token=form_token(dashboard, "viewer"))) == "403 NO_RIGHT"


def basic(user: str, password: str) -> dict[str, str]:
    encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"authorization": f"Basic {encoded}"}


def test_basic_authentication_checks_scrypt_hashes_and_limits_tries() -> None:
    policy = BasicPolicy({"anna": hash_password("horse"), "bert": hash_password("x")}, {"bert"})
    dashboard = dashboard_of(policy, actions=True)
    assert ask(dashboard, "/counter").headers["www-authenticate"].startswith("Basic")
    assert "anna" in ask(dashboard, "/help", headers=basic("anna", "horse")).text
    assert access_of(policy, **basic("bert", "x")) == Access("bert")
    for _ in range(5):
        wrong = ask(dashboard, "/counter", headers=basic("nobody", "horse"), client="10.0.0.9")
        assert wrong.status_code == 401
    right = basic("bert", "y")
    assert ask(dashboard, "/counter", headers=right, client="10.0.0.9").status_code == 401


def test_passwords_that_are_tried_at_the_same_time_are_limited_too() -> None:
    policy = BasicPolicy({"anna": hash_password("horse 6")})

    async def main() -> list[bool]:
        guesses = [basic("anna", f"horse {number}") for number in range(1, 7)]
        found = await asyncio.gather(*(policy.access(connection_of(**one)) for one in guesses))
        return [isinstance(one, Access) for one in found]

    assert asyncio.run(main()) == [False] * 6


def test_tabs_that_open_at_the_same_time_share_the_check_of_their_password() -> None:
    policy = BasicPolicy({"anna": hash_password("horse")})

    async def main() -> set[bool]:
        right = basic("anna", "horse")
        found = await asyncio.gather(*(policy.access(connection_of(**right)) for _ in range(8)))
        return {isinstance(one, Access) for one in found}

    assert asyncio.run(main()) == {True}
    for _ in range(4):
        assert not isinstance(access_of(policy, **basic("anna", "no")), Access)
    assert policy._tries.are_left("127.0.0.1"), "the right password does not count as a wrong try"


def test_headers_that_cannot_be_read_are_refused() -> None:
    dashboard = dashboard_of(allowed_hosts=frozenset(LOOPBACK_NAMES), actions=True)
    assert ask(dashboard, "/counter", headers={"host": "evil[x"}).status_code == 421
    refused = post(dashboard, {"origin": "http://["}, token=form_token(dashboard))
    assert code_of(refused) == "403 CROSS_SITE"
    policy = BasicPolicy({"anna": hash_password("horse")})
    answer = access_of(policy, authorization="Basic \u00ff")
    assert isinstance(answer, Response)
    assert answer.status_code == 401


class AnyoneMayAct:
    async def can_view(self, request: HTTPConnection) -> bool:
        return True

    async def can_act(self, request: HTTPConnection) -> bool:
        return True


def test_the_name_of_an_authenticated_user_is_the_same_in_every_request() -> None:
    policy = AdaptedPolicy(AnyoneMayAct())
    for user, name in ((SimpleUser("anna"), "anna"), ("bert", "bert"), (None, "viewer")):
        connection = connection_of()
        connection.scope["user"] = user
        assert asyncio.run(policy.access(connection)) == Access(name, VERBS, sees_payload=True)


def test_a_token_leaves_the_address_of_an_open_session_too() -> None:
    dashboard = dashboard_of(TokenPolicy(TOKEN, Signer("secret")))
    session = dict(ask(dashboard, f"/counter?token={TOKEN}").cookies)
    again = ask(dashboard, f"/counter?a=1&token={TOKEN}", cookies=session)
    assert (again.status_code, again.headers["location"]) == (303, "/counter?a=1")


def test_a_new_token_ends_the_sessions_of_the_one_before() -> None:
    signer = Signer("secret")
    session = dict(ask(dashboard_of(TokenPolicy(TOKEN, signer)), f"/help?token={TOKEN}").cookies)
    changed = dashboard_of(TokenPolicy("n" * 32, signer))
    assert ask(changed, "/help", cookies=session).status_code == 401


def test_a_token_opens_a_session_and_leaves_the_address() -> None:
    dashboard = dashboard_of(TokenPolicy(TOKEN, Signer("secret")))
    login = ask(dashboard, "/counter")
    assert (login.status_code, "Token of this dashboard" in login.text) == (401, True)
    refused = ask(dashboard, "/api/pause", "POST")
    assert (refused.status_code, refused.json()["code"]) == (401, "UNAUTHENTICATED")
    opened = ask(dashboard, f"/counter?a=1&token={TOKEN}")
    assert (opened.status_code, opened.headers["location"]) == (303, "/counter?a=1")
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert ask(dashboard, "/counter", cookies=dict(opened.cookies)).status_code == 200
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert ask(dashboard, "/counter", headers=bearer).status_code == 200


def test_a_token_is_typed_into_the_login_page_too() -> None:
    dashboard = dashboard_of(TokenPolicy(TOKEN, Signer("secret")))
    wrong = ask(dashboard, "/login", "POST", headers=HERE, data={"secret": "no"})
    assert (wrong.status_code, "wrong" in wrong.text) == (401, True)
    right = ask(dashboard, "/login", "POST", headers=HERE, data={"secret": TOKEN})
    assert right.status_code == 303
    assert "horsies_session" in right.cookies


def test_a_forged_or_old_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboard = dashboard_of(TokenPolicy(TOKEN, Signer("secret")))
    for forged in ("", "x", "dG9rZW4=.9999999999.x", Signer("other").sealed("session", "u", 60)):
        assert ask(dashboard, "/counter", cookies={"horsies_session": forged}).status_code == 401
    session = ask(dashboard, f"/counter?token={TOKEN}").cookies["horsies_session"]
    monkeypatch.setattr("time.time", lambda: 1e12)
    assert ask(dashboard, "/counter", cookies={"horsies_session": session}).status_code == 401


def test_five_wrong_tokens_make_an_address_wait() -> None:
    dashboard = dashboard_of(TokenPolicy(TOKEN, Signer("secret")))
    for _ in range(5):
        ask(dashboard, "/counter?token=wrong", client="10.0.0.9")
    assert ask(dashboard, f"/counter?token={TOKEN}", client="10.0.0.9").status_code == 401
    assert ask(dashboard, f"/counter?token={TOKEN}", client="10.0.0.8").status_code == 303


def test_the_address_of_a_failed_login_leads_to_the_login_again() -> None:
    dashboard = dashboard_of(TokenPolicy(TOKEN, Signer("secret")))
    assert ask(dashboard, "/login", "POST", data={"secret": "wrong"}).status_code == 401
    again = ask(dashboard, "/login")
    assert (again.status_code, again.headers["location"]) == (303, "/")


def test_a_cookie_is_secure_behind_a_trusted_proxy_with_https() -> None:
    policy = TokenPolicy(TOKEN, Signer("secret"))
    dashboard = dashboard_of(policy, proxies=parse_networks(["10.0.0.1"]))
    https = {"x-forwarded-proto": "https"}
    path = f"/counter?token={TOKEN}"
    trusted = ask(dashboard, path, client="10.0.0.1", headers=https)
    assert "Secure" in trusted.headers["set-cookie"]
    other = ask(dashboard, path, client="10.0.0.2", headers=https)
    assert "Secure" not in other.headers["set-cookie"]


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 32 characters"):
        TokenPolicy("short", Signer())


def test_everyone_is_allowed_by_allow_all() -> None:
    assert access_of(AllowAll("local")) == Access("local", VERBS, True)
