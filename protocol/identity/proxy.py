"""The HTTP proxy of a site, which opens tunnels to the outside (CONNECT), as HTTPS_PROXY and NO_PROXY name it.

The proxy sees addresses and encrypted bytes. Loopback addresses are never reached over it. gRPC's proxy support is off:
it makes no exception for loopback, and also reads variables that are meant for other protocols.
"""

import asyncio
import base64
import ipaddress
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

import grpc

from atoll.ground.address import bracketed
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import Identity
from atoll.protocol.settings import ConfigError
from atoll.protocol.wire.channel import Option

NAMES = ("https_proxy", "HTTPS_PROXY")
BYPASS_NAMES = ("no_proxy", "NO_PROXY")
PORT = 80
ANSWER_BYTES_MAX = 16 * 1024

_ALLOWED = "allowed: http://HOST:PORT or http://USER:PASSWORD@HOST:PORT, with special characters percent-encoded"


class ProxyRefused(OSError):
    """Error: the proxy refuses a tunnel; the text contains its answer."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """Proxy, and the hosts that are reached without it."""

    host: str
    port: int
    user: str | None = field(default=None, repr=False)
    password: str = field(default="", repr=False)
    bypass: tuple[str, ...] = ()
    """Entries of NO_PROXY, in lower case."""
    _userinfo: str = field(default="", repr=False)  # percent-encoded, as in the environment

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "HttpProxy | None":
        """Return the proxy that an environment names, or None.

        Raises:
            ConfigError: the proxy cannot be used. The text contains no credentials.
        """
        name, url = next(((name, environment[name]) for name in NAMES if environment.get(name)), ("", ""))
        if not url:
            return None
        listed = next((environment[name] for name in BYPASS_NAMES if environment.get(name)), "")
        bypass = tuple(entry.strip().lower() for entry in listed.split(",") if entry.strip())
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            return cls._parsed(parts, bypass)
        except ValueError as error:
            fault = str(error) if isinstance(error, _Fault) else "not a URL"
            raise ConfigError([f"{name}: {fault}; {_ALLOWED}"]) from None

    @classmethod
    def _parsed(cls, parts: SplitResult, bypass: tuple[str, ...]) -> "HttpProxy":
        if parts.scheme != "http":
            raise _Fault(f"got {parts.scheme[:20]}://...")
        host, port = parts.hostname, parts.port
        if not host or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise _Fault("got a URL with no host, or with a path")
        if not all(letter.isalnum() or letter in ".-:_" for letter in host) or not host.isascii():
            raise _Fault("got a host with characters that are not allowed")
        user = None if parts.username is None else unquote(parts.username, errors="strict")
        password = unquote(parts.password or "", errors="strict")
        if user is not None and not (user and ":" not in user and (user + password).isprintable()):
            raise _Fault("got a user that is empty or has a colon, or a user or password that is not printable")
        userinfo = parts.netloc.rpartition("@")[0]
        return cls(host, PORT if port is None else port, user, password, bypass, userinfo)

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def _url(self) -> str:
        return f"http://{self._userinfo}{'@' if self._userinfo else ''}{self}"

    def is_for(self, address: str) -> bool:
        """Return whether `host:port` is reached over the proxy: not on loopback, and not named by NO_PROXY."""
        host, _, port = address.rpartition(":")
        host = host.strip("[]").lower().rstrip(".")
        return not (_is_this_machine(host) or any(_is_named(host, port, entry) for entry in self.bypass))

    def options(self, address: str) -> Sequence[Option]:
        """Return the gRPC options of a channel to an address."""
        return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", self._url)] if self.is_for(address) else []

    async def open_tls(
        self, address: str, context: ssl.SSLContext, server_hostname: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a TLS connection to an address through a tunnel.

        Args:
            address: host:port of the server.
            context: the context of the TLS connection.
            server_hostname: name for SNI and for the check of the certificate.

        Raises:
            OSError: the proxy cannot be reached or opens no tunnel, or the handshake fails.
        """
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=ANSWER_BYTES_MAX)
        try:
            login = ""
            if self.user is not None:
                credentials = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
                login = f"Proxy-Authorization: Basic {credentials}\r\n"
            writer.write(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{login}\r\n".encode())
            status = _status(await reader.readuntil(b"\r\n\r\n"))
            if not 200 <= status < 300:
                raise ProxyRefused(f"the proxy {self} opens no tunnel to {address}: HTTP {status}")
            await writer.start_tls(context, server_hostname=server_hostname)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            writer.close()
            raise ProxyRefused(f"the proxy {self} does not answer CONNECT: {error}") from None
        except BaseException:
            writer.close()
            raise
        return reader, writer


class _Fault(ValueError):
    """Fault of the proxy's URL; the text contains no secret."""


class ProxyDialer:
    """Dialer that wraps another one and uses a proxy for the addresses that need it."""

    def __init__(self, dialer: Dialer, proxy: HttpProxy) -> None:
        self._dialer, self._proxy = dialer, proxy

    @property
    def credential(self) -> Credential | None:
        """The credential of the other dialer."""
        return self._dialer.credential

    def check(self, address: str) -> None:
        """Check that an address may be dialled; raises ConfigError."""
        self._dialer.check(address)

    def channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.aio.Channel:
        """Open a channel for asyncio."""
        return self._dialer.channel(address, server, [*options, *self._proxy.options(address)])

    def blocking_channel(self, address: str, server: Identity, options: Sequence[Option] = ()) -> grpc.Channel:
        """Open a channel with blocking calls."""
        return self._dialer.blocking_channel(address, server, [*options, *self._proxy.options(address)])


def through_proxy(dialer: Dialer, environment: Mapping[str, str]) -> Dialer:
    """Return the dialer itself, or one over the proxy that the environment names.

    Raises:
        ConfigError: the environment names a proxy that cannot be used.
    """
    proxy = HttpProxy.of(environment)
    return dialer if proxy is None else ProxyDialer(dialer, proxy)


def _status(answer: bytes) -> int:
    words = answer.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ProxyRefused("the server at the proxy's address is not an HTTP proxy")
    return int(words[1][:3])


def _is_this_machine(host: str) -> bool:
    address = _ip(host)
    return host == "localhost" or host.endswith(".localhost") or (address is not None and address.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_named(host: str, port: str, entry: str) -> bool:
    """Return whether an entry of NO_PROXY matches a host: `*`, a domain with its subdomains, an address or network."""
    name, colon, its_port = entry.rpartition(":")
    if colon and its_port.isdigit() and name.count(":") != 1 and _ip(entry) is None:
        if its_port != port:
            return False
        entry = name.strip("[]")
    if entry == "*":
        return True
    if (address := _ip(host)) is not None:
        try:
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
        except ValueError:
            return False
    domain = entry.removeprefix("*").removeprefix(".")
    return host == domain or host.endswith(f".{domain}")
