"""Links that work once, sessions, and the check of every request."""

import asyncio
from typing import Any

import pytest

from atoll.dashboard import access
from atoll.dashboard.access import (
    HEADERS,
    LINK_S,
    SESSION_S,
    SESSIONS_MAX,
    Forms,
    Guard,
    LoopbackDoor,
    Refused,
    Sessions,
    Visitor,
    new_key,
    new_token,
)
from tests.waiting import BOUND_S

HOSTS = {"127.0.0.1:7080", "localhost:7080"}


def test_a_link_opens_one_session_once() -> None:
    key = new_key()
    sessions, token = Sessions(key), new_token(key, 100.0)
    cookie = sessions.opened_by(token, 101.0)
    assert cookie is not None
    assert sessions.opened_by(token, 101.0) is None, "it was used"
    assert sessions.opened_by(new_token(key, 100.0), 101.0) not in (None, cookie)
    assert sessions.knows(cookie, 101.0 + SESSION_S - 1)
    assert not sessions.knows(cookie, 101.0 + SESSION_S)
    assert not sessions.knows("", 101.0)
    assert not sessions.knows(cookie + "x", 101.0)


@pytest.mark.parametrize("at", [100.0 + LINK_S, 1e12])
def test_an_old_link_opens_none(at: float) -> None:
    key = new_key()
    assert Sessions(key).opened_by(new_token(key, 100.0), at) is None


def test_a_forged_link_opens_none() -> None:
    key = new_key()
    token = new_token(key, 100.0)
    nonce, until, signature = token.split(".")
    forged = [
        new_token(new_key(), 100.0),
        f"{nonce}.{int(until) + 999}.{signature}",
        f"x{nonce}.{until}.{signature}",
        f"{nonce}.{until}.{signature[:-1]}",
        f"{nonce}.{until}",
        "",
        "..",
        "é\udc80.1.2",
    ]
    sessions = Sessions(key)
    assert [sessions.opened_by(each, 101.0) for each in forged] == [None] * len(forged)
    assert sessions.opened_by(token, 101.0) is not None


def test_the_oldest_session_makes_room() -> None:
    key = new_key()
    sessions = Sessions(key)
    cookies = [sessions.opened_by(new_token(key, 0.0), 1.0) or "" for _ in range(SESSIONS_MAX + 1)]
    assert [sessions.knows(cookie, 2.0) for cookie in (cookies[0], cookies[1], cookies[-1])] == [False, True, True]


def test_no_key_or_cookie_is_kept_as_it_was_given() -> None:
    key = new_key()
    sessions = Sessions(key)
    cookie = sessions.opened_by(new_token(key, 0.0), 1.0)
    assert cookie is not None
    assert cookie not in str(vars(sessions))


def answered(
    headers: dict[str, str], *, method: str = "GET", path: str = "/", knows: str = "", is_controlled: bool = False
) -> tuple[int, Any]:
    """Return status and headers of the answer of a guard to one request."""
    sent: list[dict[str, Any]] = []

    class One(Sessions):
        def knows(self, cookie: str, now: float) -> bool:
            return cookie == knows

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"Cache-Control", b"public")]})
        await send({"type": "http.response.body", "body": b"a page"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
    door = LoopbackDoor(One(new_key()), HOSTS, lambda: 0.0, "atoll-7080")
    guard = Guard(app, door, is_controlled=is_controlled)
    asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
    return sent[0]["status"], dict(sent[0]["headers"]) | {b"body": b"".join(one["body"] for one in sent[1:])}


GOOD = {"host": "127.0.0.1:7080", "cookie": "other=1; atoll-7080=known"}


@pytest.mark.parametrize(
    ("change", "method", "status"),
    [
        ({}, "GET", 200),
        ({}, "HEAD", 200),
        ({"host": "LocalHost:7080"}, "GET", 200),
        ({"origin": "http://127.0.0.1:7080"}, "GET", 200),
        ({"cookie": "atoll-7080=other"}, "GET", 403),
        ({"cookie": "atoll-7081=known"}, "GET", 403),
        ({"cookie": ""}, "GET", 403),
        ({"cookie": "atoll-7080"}, "GET", 403),
        ({"host": "evil.example:7080"}, "GET", 403),
        ({"host": "127.0.0.1"}, "GET", 403),
        ({"host": "127.0.0.1:7081"}, "GET", 403),
        ({"host": ""}, "GET", 403),
        ({"origin": "http://evil.example"}, "GET", 403),
        ({"origin": "null"}, "GET", 403),
        ({"origin": "https://127.0.0.1:7080"}, "GET", 403),
        ({"origin": "127.0.0.1:7080"}, "GET", 403),
        ({"origin": "http://localhost:7080"}, "GET", 403),
        *(({}, method, 403) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")),
    ],
)
def test_a_request_needs_host_origin_session_and_get(change: dict[str, str], method: str, status: int) -> None:
    found, headers = answered(GOOD | change, method=method, knows="known")
    assert found == status
    assert {name.decode(): value.decode() for name, value in headers.items()}.items() >= HEADERS.items()
    assert (headers[b"body"] == b"a page") == (status == 200)


@pytest.mark.parametrize(
    ("change", "method", "status"),
    [
        ({"origin": "http://127.0.0.1:7080"}, "POST", 200),
        ({"origin": "http://LOCALHOST:7080", "host": "localhost:7080"}, "POST", 200),
        ({}, "POST", 403),
        ({"origin": "null"}, "POST", 403),
        ({"origin": "http://localhost:7080"}, "POST", 403),
        ({"origin": "http://127.0.0.1:7081"}, "POST", 403),
        ({"origin": "http://127.0.0.1:7080", "cookie": ""}, "POST", 403),
        ({"origin": "http://evil.example", "host": "evil.example"}, "POST", 403),
        *(({"origin": "http://127.0.0.1:7080"}, method, 403) for method in ("PUT", "DELETE", "PATCH", "OPTIONS")),
    ],
)
def test_a_change_needs_the_origin_of_its_own_host(change: dict[str, str], method: str, status: int) -> None:
    assert answered(GOOD | change, method=method, knows="known", is_controlled=True)[0] == status
    assert answered(GOOD | change, method=method, knows="known")[0] == 403


def test_a_token_is_bound_to_its_visitor_and_process() -> None:
    forms, one, other = Forms(), Visitor(b"one"), Visitor(b"other")
    forms.check(one, forms.token(one))
    for token in (forms.token(other), Forms().token(one), "", forms.token(one)[:-1], "é\udc80"):
        with pytest.raises(Refused, match="of another session"):
            forms.check(one, token)


def test_an_answer_that_lasts_ends_with_the_session() -> None:
    sent: list[Any] = []
    ended = []
    now = 0.0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal now
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"news", "more_body": True})
        now = SESSION_S + 1
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    key = new_key()
    sessions = Sessions(key)
    cookie = sessions.opened_by(new_token(key, 0.0), 0.0) or ""
    door = LoopbackDoor(sessions, HOSTS, lambda: now, "c")
    headers = [(b"host", b"localhost:7080"), (b"cookie", f"c={cookie}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/live", "headers": headers}
    asyncio.run(asyncio.wait_for(Guard(app, door)(scope, None, send), BOUND_S))  # type: ignore[arg-type]
    assert ended == [True]
    assert [one.get("more_body", False) for one in sent[1:]] == [True, False]


@pytest.mark.parametrize(("role", "is_done"), [("operator", True), ("auditor", False), ("", False)])
def test_a_change_counts_when_its_body_is_whole(role: str, is_done: bool) -> None:
    """Send a body during which the visitor keeps the role, has another one, or has none any more."""
    roles, done, sent = ["operator", role], list[bool](), list[Any]()

    class Changing:
        def origins(self, host: str) -> list[str]:
            return [f"http://{host}"]

        def check_host(self, host: str) -> None:
            pass

        async def visitor(self, scope: Any, headers: Any) -> Visitor:
            if not (found := roles.pop(0)):
                raise Refused("no role")
            return Visitor(b"olga", "olga", found)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        done.append(True)

    parts = [{"type": "http.request", "body": b"a", "more_body": is_more} for is_more in (True, False)]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"h"), (b"origin", b"http://h")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    asyncio.run(Guard(app, Changing(), is_controlled=True)(scope, receive, send))
    assert done == [True] * is_done
    assert [one["status"] for one in sent[:1]] == [403] * (not is_done)


def test_the_login_needs_no_session_and_still_a_host() -> None:
    assert answered({"host": "127.0.0.1:7080"}, path=access.LOGIN)[0] == 200
    assert answered({"host": "evil.example"}, path=access.LOGIN)[0] == 403


def test_no_style_and_no_script_is_inline() -> None:
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
