"""Access to the pages: links that work once, sessions of browsers, and the check of every request.

A link has a nonce and the end of its validity, signed with the key of the process. The key lies in a file that its
owner alone can read, so `atoll dashboard link` makes links without calling the process, which remembers used nonces.
A session is a cookie, of which the process keeps the digest alone; sessions end with the process.
"""

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LINK_S = 600.0
"""Seconds in which a link can be used."""

SESSION_S = 12 * 3600.0
"""Seconds after which a session ends."""

SESSIONS_MAX = 1_000
"""Largest number of sessions; a further one ends the oldest."""

LOGIN = "/login"

HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "worker-src 'self'; img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer."""


def new_key() -> bytes:
    """Return a key that signs links."""
    return secrets.token_bytes(32)


def new_token(key: bytes, now: float) -> str:
    """Return the secret part of a link: nonce, end of its validity, and their signature.

    Args:
        key: the key of the process.
        now: the time [s since the epoch].
    """
    text = f"{secrets.token_urlsafe(16)}.{int(now + LINK_S)}"
    return f"{text}.{_signature(key, text)}"


class Sessions:
    """The used links and the open sessions of a process.

    Args:
        key: the key that signs links.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._used: dict[str, float] = {}
        self._open: dict[bytes, float] = {}

    def opened_by(self, token: str, now: float) -> str | None:
        """Return the cookie of a new session; None: the link is not of this process, too old, or used.

        Args:
            token: the secret part of a link.
            now: the time [s since the epoch].
        """
        text, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), _signature(self._key, text).encode()):
            return None
        nonce, _, until = text.partition(".")
        self._used = {used: end for used, end in self._used.items() if end > now}
        if int(until) <= now or nonce in self._used:
            return None
        self._used[nonce] = float(until)
        cookie = secrets.token_urlsafe(32)
        self._open[_digest(cookie)] = now + SESSION_S
        while len(self._open) > SESSIONS_MAX:
            del self._open[next(iter(self._open))]
        return cookie

    def knows(self, cookie: str, now: float) -> bool:
        """Return whether a cookie belongs to an open session."""
        return self._open.get(_digest(cookie), 0.0) > now


class Guard:
    """Check of each request before the pages see it: Host, method and session; and the headers of each answer.

    It is plain ASGI: a middleware that buffers would break the end of a stream.

    Args:
        app: the pages.
        sessions: the sessions.
        hosts: the values of `Host` that name the listener, in lower case.
        clock: returns the time [s since the epoch].
        cookie: the name of the cookie; each port has its own, as browsers do not part cookies by port.
    """

    def __init__(self, app: App, sessions: Sessions, hosts: set[str], clock: Callable[[], float], cookie: str) -> None:
        self._app, self._sessions, self._hosts, self._clock, self._cookie = app, sessions, hosts, clock, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                kept = [(name, value) for name, value in message["headers"] if name.decode().lower() not in HEADERS]
                message = {**message, "headers": [*kept, *ours]}
            await send(message)

        if fault := self._fault(scope):
            await _refuse(fault, guarded, with_body=scope["method"] != "HEAD")
            return
        await self._app(scope, receive, guarded)

    def _fault(self, scope: Scope) -> str:
        """Return why a request is refused; empty: it is not."""
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value.lower() for name, value in headers if name == "host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return f"this address is not the dashboard's: open {sorted(self._hosts)[0]}"
        if scope["method"] not in ("GET", "HEAD"):
            return "these pages are read only: only GET is allowed"
        origins = [value for name, value in headers if name == "origin"]
        if any(origin.removeprefix("http://") not in self._hosts for origin in origins):
            return "the request comes from a page of another origin"
        if scope["path"] == LOGIN:
            return ""
        values = [value for name, value in headers if name == "cookie"]
        cookies = dict(part.strip().partition("=")[::2] for value in values for part in value.split(";"))
        if not self._sessions.knows(cookies.get(self._cookie, ""), self._clock()):
            return "there is no session: `atoll dashboard link` prints a link that opens one"
        return ""


async def _refuse(fault: str, send: Send, *, with_body: bool) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"{fault}\n".encode() if with_body else b""})


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
