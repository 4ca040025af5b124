"""HTTPS_PROXY and NO_PROXY: valid values, refusals, and that no refusal contains a secret."""

import asyncio
import socket
import ssl

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.identity.dialer import InsecureDialer
from atoll.protocol.identity.names import COORDINATOR
from atoll.protocol.identity.proxy import HttpProxy, ProxyRefused, through_proxy
from atoll.protocol.settings import ConfigError

ADDRESS = "atoll.example:443"


def proxy(url: str = "http://proxy.example:3128", no_proxy: str = "") -> HttpProxy:
    found = HttpProxy.of({"HTTPS_PROXY": url, "NO_PROXY": no_proxy})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("url", "address", "user", "password"),
    [
        ("http://proxy.example:3128", "proxy.example:3128", None, ""),
        ("proxy.example:3128", "proxy.example:3128", None, ""),
        ("http://proxy.example/", "proxy.example:80", None, ""),
        ("http://[2001:db8::1]:8080", "[2001:db8::1]:8080", None, ""),
        ("http://north:s3cret@proxy.example:3128", "proxy.example:3128", "north", "s3cret"),
        ("http://no%40rth:s%3Ae%2Fc@proxy.example:3128", "proxy.example:3128", "no@rth", "s:e/c"),
        ("http://north@10.0.0.1:1", "10.0.0.1:1", "north", ""),
    ],
)
def test_what_the_environment_names(url: str, address: str, user: str | None, password: str) -> None:
    found = proxy(url)
    assert (str(found), found.user, found.password) == (address, user, password)
    assert "s3cret" not in repr(found)
    assert found.options(ADDRESS)[0] == ("grpc.enable_http_proxy", 1)


def test_the_environments_names_in_their_order() -> None:
    assert HttpProxy.of({}) is None
    assert HttpProxy.of({"HTTPS_PROXY": ""}) is None
    assert HttpProxy.of({"http_proxy": "http://a:1", "grpc_proxy": "http://b:1", "all_proxy": "http://c:1"}) is None
    found = HttpProxy.of({"https_proxy": "http://a:1", "HTTPS_PROXY": "http://b:1"})
    assert str(found) == "a:1"
    dialer = InsecureDialer()
    assert through_proxy(dialer, {}) is dialer


@pytest.mark.parametrize(
    "url",
    [
        "https://u:s3cret@proxy:1",
        "socks5://u:s3cret@proxy:1",
        "http://u:s3cret@",
        "http://u:s3cret@proxy:99999",
        "http://u:s3cret@proxy:x",
        "http://u:s3cret@proxy:1/way",
        "http://u:s3cret@pro xy:1",
        "http://u:s3cret%00@proxy:1",
        "http://u:s3cret%ff@proxy:1",
        "http://u%3Ax:s3cret@proxy:1",
        "http://:s3cret@proxy:1",
        "http://u:s3cret@[proxy:1",
    ],
)
def test_what_cannot_be_used_is_refused_and_its_secret_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        proxy(url)
    [fault] = caught.value.faults
    assert fault.startswith("HTTPS_PROXY: ")
    assert "allowed: http://HOST:PORT" in fault
    assert "s3cret" not in fault


@given(st.text(max_size=40))
def test_any_other_text_is_a_proxy_or_a_fault(text: str) -> None:
    try:
        found = HttpProxy.of({"https_proxy": text})
    except ConfigError:
        return
    assert found is None or found.host


@pytest.mark.parametrize(
    "address", ["127.0.0.1:7070", "127.8.8.8:1", "localhost:7070", "LOCALHOST:1", "x.localhost:1", "[::1]:7070"]
)
def test_this_machine_is_never_reached_over_a_proxy(address: str) -> None:
    assert not proxy().is_for(address)
    assert proxy().options(address) == []


@pytest.mark.parametrize(
    ("no_proxy", "passes", "goes_through"),
    [
        ("", [], ["a.example:1", "10.0.0.1:1"]),
        ("*", ["a.example:1", "10.0.0.1:1"], []),
        ("example", ["example:1", "a.example:1", "a.b.Example.:1"], ["myexample:1", "example.org:1"]),
        (".a.example, b.example", ["a.example:1", "x.a.example:1", "b.example:1"], ["c.example:1"]),
        ("*.a.example", ["x.a.example:1"], ["xa.example:1"]),
        ("a.example:443", ["a.example:443"], ["a.example:444"]),
        ("10.0.0.0/8,2001:db8::/32", ["10.9.9.9:1", "[2001:db8::7]:1"], ["11.0.0.1:1", "ten.example:1"]),
        ("10.0.0.1:443", ["10.0.0.1:443"], ["10.0.0.1:444"]),
        ("::2", ["[::2]:1"], ["[::3]:1"]),
    ],
)
def test_what_no_proxy_names_is_reached_without(no_proxy: str, passes: list[str], goes_through: list[str]) -> None:
    found = proxy(no_proxy=no_proxy)
    assert [address for address in passes if found.is_for(address)] == []
    assert [address for address in goes_through if not found.is_for(address)] == []


@pytest.mark.real
def test_an_insecure_channel_to_another_machine_is_refused_with_a_proxy_as_without() -> None:
    dialer = through_proxy(InsecureDialer(), {"HTTPS_PROXY": "http://proxy.example:1"})
    with pytest.raises(ConfigError):
        dialer.blocking_channel(ADDRESS, COORDINATOR)
    with dialer.blocking_channel("127.0.0.1:1", COORDINATOR) as channel:
        assert isinstance(channel, grpc.Channel)


@pytest.mark.real
@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "opens no tunnel to atoll.example:443: HTTP 407"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "is not an HTTP proxy"),
        (b"HTTP/1.1 2", "does not answer CONNECT"),
        (b"x" * 70_000, "does not answer CONNECT"),
    ],
)
def test_a_proxy_that_opens_no_tunnel_says_why(answer: bytes, what: str) -> None:
    async def ask() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, family=socket.AF_INET)
        found = proxy(f"http://u:s3cret@127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ProxyRefused) as caught:
            await found.open_tls(ADDRESS, ssl.create_default_context(), "x")
        assert what in str(caught.value)
        assert "s3cret" not in str(caught.value)
        server.close()
        await server.wait_closed()

    asyncio.run(ask())
