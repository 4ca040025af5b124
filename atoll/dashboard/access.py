"""Access to the pages: links that work once, sessions of browsers, and the check of every request.

A link has a nonce and the end of its validity, signed with the key of the process. The key lies in a file that its
owner alone can read, so `atoll dashboard link` makes links without calling the process, which remembers used nonces.
A session is a cookie, of which the process keeps the digest alone; sessions end with the process.
"""

import asyncio
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import anyio

from atoll.ground.address import is_address

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

VISITOR = "atoll.visitor"
"""The key of the visitor in the scope of a request."""

CERTIFICATE = "certificate"
"""The key of the certificate of a connection (DER) in the state of its requests."""

LOOK_UP_S = 5.0
"""Longest wait for the answer whether a certificate is revoked [s]."""

CHECK_S = 0.25
"""Seconds between two checks of the visitor of an answer that lasts, such as a stream."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "worker-src 'self'; img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # `no-referrer` makes a browser send the Origin `null` with a form
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


@dataclass(frozen=True)
class Visitor:
    """Person who looks.

    Args:
        key: the secret or the name that their forms are bound to.
        name: their name; empty: the owner of this process.
        role: their role; empty: the one of the process's credential.
    """

    key: bytes
    name: str = ""
    role: str = ""


class Refused(Exception):
    """Refusal of a request; the text says why."""


Headers = Sequence[tuple[str, str]]


class Door(Protocol):
    """Way by which visitors come in: with a link, with a certificate, or through a proxy."""

    def origins(self, host: str) -> list[str]:
        """Return the origins of the pages at a value of `Host`."""

    def check_host(self, host: str) -> None:
        """Check a value of `Host`, in lower case; raises Refused."""

    async def visitor(self, scope: Scope, headers: Headers) -> Visitor | None:
        """Return the visitor of a request; None: the page of the login, which needs none; raises Refused."""


class LoopbackDoor:
    """Door for browsers on this machine: a link opens a session, whose cookie each request has.

    Args:
        sessions: the sessions.
        hosts: the values of `Host` that name the listener, in lower case.
        clock: returns the time [s since the epoch].
        cookie: the name of the cookie; each port has its own, as browsers do not part cookies by port.
    """

    def __init__(self, sessions: Sessions, hosts: set[str], clock: Callable[[], float], cookie: str) -> None:
        self._sessions, self._hosts, self._clock, self.cookie = sessions, hosts, clock, cookie

    def origins(self, host: str) -> list[str]:
        """Return the origin of the pages at a host."""
        return [f"http://{host}"]

    def opened_by(self, token: str) -> str | None:
        """Return the cookie of a new session; None: the link is not of this process, too old, or used."""
        return self._sessions.opened_by(token, self._clock())

    def check_host(self, host: str) -> None:
        """Check a value of `Host`: another name that resolves to loopback is another page's (DNS rebinding)."""
        if host not in self._hosts:
            raise Refused(f"this address is not the dashboard's: open {sorted(self._hosts)[0]}")

    async def visitor(self, scope: Scope, headers: Headers) -> Visitor | None:
        """Return the owner of this process, by the cookie of a session."""
        if scope["path"] == LOGIN:
            return None
        values = [value for name, value in headers if name == "cookie"]
        cookies = dict(part.strip().partition("=")[::2] for value in values for part in value.split(";"))
        cookie = cookies.get(self.cookie, "")
        if not self._sessions.knows(cookie, self._clock()):
            raise Refused("there is no session: `atoll dashboard link` prints a link that opens one")
        return Visitor(_digest(cookie))


class Readers(Protocol):
    """Check of the certificates of visitors, as the metrics of a process have it."""

    @property
    def name(self) -> str:
        """The DNS name in the certificate of the listener."""

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake."""

    def refusal(self, certificate: bytes | None) -> str:
        """Return why a visitor is refused, by its certificate (DER); empty: it may look."""


class CertificateDoor:
    """Door for browsers on other machines: TLS with a client certificate of a role that may look.

    Args:
        readers: the check of the certificates.
        host: the host of the listener.
    """

    def __init__(self, readers: Readers, host: str) -> None:
        self._readers, self._names = readers, {readers.name, "localhost", host.lower()}

    def origins(self, host: str) -> list[str]:
        """Return the origin of the pages at a host."""
        return [f"https://{host}"]

    def check_host(self, host: str) -> None:
        """Check a value of `Host`: an address, or the name of the listener or of its certificate; any port."""
        bare = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if bare not in self._names and not is_address(bare):
            raise Refused(f"this address is not the dashboard's: open {self._readers.name}")

    async def visitor(self, scope: Scope, headers: Headers) -> Visitor | None:
        """Return the visitor whose certificate the connection of a request has."""
        certificate = scope.get("state", {}).get(CERTIFICATE)
        try:
            async with asyncio.timeout(LOOK_UP_S):
                refusal = await anyio.to_thread.run_sync(self._readers.refusal, certificate, abandon_on_cancel=True)
        except TimeoutError:
            refusal = "whether a certificate is revoked cannot be read now"
        if refusal or certificate is None:
            raise Refused(refusal or "the connection has no certificate")
        return Visitor(hashlib.sha256(certificate).digest())


class Forms:
    """Tokens of forms, each bound to a visitor: a page of another origin can neither read nor guess one."""

    def __init__(self) -> None:
        self._key = new_key()

    def token(self, visitor: Visitor) -> str:
        """Return the token of a visitor's forms."""
        return hmac.new(self._key, visitor.key, hashlib.sha256).hexdigest()

    def check(self, visitor: Visitor, token: str) -> None:
        """Check the token that a form has sent; raises Refused."""
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.token(visitor).encode()):
            raise Refused("the form is of another session: load its page again")


class Guard:
    """Check of each request before the pages see it: Host, method, Origin and visitor; and the headers of each answer.

    It is plain ASGI: a middleware that buffers would break the end of a stream. An answer that lasts ends when its
    visitor may no longer look.

    Args:
        app: the pages.
        door: the way by which visitors come in.
        is_controlled: whether POST is allowed.
    """

    def __init__(self, app: App, door: Door, *, is_controlled: bool = False) -> None:
        self._app, self._door = app, door
        self._methods = ("GET", "HEAD", "POST") if is_controlled else ("GET", "HEAD")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        is_begun = is_complete = False

        async def guarded(message: Message) -> None:
            nonlocal is_begun, is_complete
            if message["type"] == "http.response.start":
                is_begun = True
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                kept = [(name, value) for name, value in message["headers"] if name.decode().lower() not in HEADERS]
                message = {**message, "headers": [*kept, *ours]}
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            visitor = await self._admitted(scope)
            received = self._from_visitor(scope, receive, visitor)
            await self._while_admitted(scope, self._app({**scope, VISITOR: visitor}, received, guarded))
        except Refused as refused:
            if not is_begun:
                await refuse(str(refused), guarded, with_body=scope["method"] != "HEAD")
            elif not is_complete:
                await send({"type": "http.response.body", "body": b""})

    def _from_visitor(self, scope: Scope, receive: Receive, visitor: Visitor | None) -> Receive:
        """Return what receives a body; a POST's, which may come slowly, is whole only if its visitor may act still."""

        async def received() -> Message:
            message = await receive()
            is_whole = message["type"] == "http.request" and not message.get("more_body", False)
            if scope["method"] == "POST" and is_whole and await self._admitted(scope) != visitor:
                raise Refused("what you may do here has changed: load the page again")
            return message

        return received

    async def _while_admitted(self, scope: Scope, answer: Awaitable[None]) -> None:
        """Wait for an answer, and check its visitor meanwhile; raises Refused."""
        task = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([task], timeout=CHECK_S))[0]:
                if scope["method"] != "POST":  # a change that was sent ends with its answer
                    await self._admitted(scope)
            await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    async def _admitted(self, scope: Scope) -> Visitor | None:
        """Return the visitor of a request; None: the page of the login; raises Refused."""
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value.lower() for name, value in headers if name == "host"]
        if len(hosts) != 1:
            raise Refused("the request needs one Host")
        self._door.check_host(hosts[0])
        if scope["method"] not in self._methods:
            raise Refused(f"{scope['method']} is refused; allowed: {', '.join(self._methods)}")
        origins = [value.lower() for name, value in headers if name == "origin"]
        is_own = len(origins) == 1 and origins[0] in self._door.origins(hosts[0])
        if not is_own and (origins or scope["method"] == "POST"):
            raise Refused("the request comes from a page of another origin")
        return await self._door.visitor(scope, headers)


async def refuse(fault: str, send: Send, *, with_body: bool = True) -> None:
    """Answer a request with its refusal."""
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"{fault}\n".encode() if with_body else b""})


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "surrogatepass")).digest()
