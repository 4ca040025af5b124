"""The limits, which are the same at both ends, and the forms of addresses."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import grpc
import pytest

from atoll.protocol.settings import ConfigError
from atoll.protocol.wire import channel
from atoll.protocol.wire.channel import (
    CHUNK_BYTES,
    DOWNLOAD_WINDOW_BYTES,
    GRANT_BYTES,
    MESSAGE_BYTES_MAX,
    UPLOAD_WINDOW_BYTES,
    client_options,
    is_wildcard,
    loopback_only,
    parse_address,
    reached_as,
    server_options,
)
from atoll.server.transport.sockets import open_sockets, places_of
from benchmarks.attackers import ACK, GOAWAY, PING, PREFACE, SETTINGS, frame
from tests.federation.bad_luck.slow_line import SlowLine
from tests.waiting import BOUND_S


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:7070", "127.0.0.1", 7070),
        ("127.8.9.10:1", "127.8.9.10", 1),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("[0:0:0:0:0:0:0:1]:7070", "0:0:0:0:0:0:0:1", 7070),
    ],
)
def test_loopback_addresses_are_parsed(address: str, host: str, port: int) -> None:
    assert loopback_only(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:7070",
        "[::]:7070",
        "10.0.0.1:7070",
        "[::ffff:127.0.0.1]:7070",
        "example.org:7070",
        "localhost.example.org:7070",
    ],
)
def test_every_other_host_is_refused_with_the_reason(address: str) -> None:
    with pytest.raises(ConfigError, match="insecure connections stay on one machine"):
        loopback_only(address)
    assert parse_address(address)[1] == 7070


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", "127.0.0.1", "127.0.0.1:", ":7070", "localhost:65536", "localhost:-1", "localhost:٣", "[::1]"),
        *("[::1%eth0]:7070", "127.1:7070", "::1:7070", "[127.0.0.1]:7070", "[localhost]:7070", "unix:/tmp/socket"),
        *("1.2.3.4.5:7070", "-a.org:7070", "a..org:7070", "ä.org:7070", "dns:///a.org:7070", f"{'a.' * 127}org:7070"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    for parse in (loopback_only, parse_address):
        with pytest.raises(ConfigError, match="allowed: "):
            parse(address)


def test_others_find_what_listens_by_the_public_name_of_the_machine() -> None:
    assert reached_as("0.0.0.0:7070", "fl.example.org") == "fl.example.org:7070"
    assert reached_as("[::]:7070", "2001:db8::1") == "[2001:db8::1]:7070"
    assert reached_as("192.0.2.1:7070", "") == "192.0.2.1:7070"
    assert is_wildcard("0.0.0.0:1")
    assert is_wildcard("[::]:1")
    assert not is_wildcard("127.0.0.1:1")


def test_a_chunk_fits_a_message_and_a_window_holds_whole_chunks() -> None:
    assert CHUNK_BYTES + 64 * 1024 < MESSAGE_BYTES_MAX
    assert UPLOAD_WINDOW_BYTES % CHUNK_BYTES == DOWNLOAD_WINDOW_BYTES % CHUNK_BYTES == GRANT_BYTES % CHUNK_BYTES == 0
    assert GRANT_BYTES < DOWNLOAD_WINDOW_BYTES


def test_both_ends_have_the_same_limits_and_no_option_twice() -> None:
    server, client = dict(server_options()), dict(client_options())
    assert len(server) == len(server_options())
    assert len(client) == len(client_options())
    for name in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert server[name] == client[name] == MESSAGE_BYTES_MAX


@pytest.mark.parametrize("options", [server_options, client_options])
def test_an_option_of_the_caller_replaces_the_one_of_its_name(options) -> None:
    """Give none twice: gRPC takes the first, and ports for strangers had the limits of members."""
    over = (("grpc.max_receive_message_length", 7), ("grpc.new", 1))
    assert sorted(options(over)) == sorted((dict(options()) | dict(over)).items())


@pytest.mark.real
def test_pings_are_answered_however_many_come_and_end_nothing() -> None:
    """Send PINGs without a limit, which would cost more than the answers: see `server_options`."""
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    port, count = server.add_insecure_port("127.0.0.1:0"), 5000
    server.start()
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as peer, peer.makefile("rb") as answers:
        peer.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(SETTINGS, ACK, 0, b""))
        for number in range(count):
            peer.sendall(frame(PING, 0, 0, number.to_bytes(8, "big")))
        answered = []
        while len(answered) < count:
            length, kind, flags, _ = struct.unpack(">xHBBI", answers.read(9))
            payload = answers.read(length)
            assert kind != GOAWAY
            if (kind, flags) == (PING, ACK):
                answered.append(int.from_bytes(payload, "big"))
        assert answered == list(range(count))
    server.stop(None).wait(10)


@pytest.mark.real
def test_a_second_server_on_the_same_port_fails_to_bind() -> None:
    first, second = (grpc.server(ThreadPoolExecutor(1), options=server_options()) for _ in range(2))
    port = first.add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError):
        second.add_insecure_port(f"127.0.0.1:{port}")


@pytest.mark.real
def test_a_server_gives_up_a_silent_connection_before_its_client_would(monkeypatch: pytest.MonkeyPatch) -> None:
    assert channel.PROOF_S < channel.HANDSHAKE_S
    monkeypatch.setattr(channel, "PROOF_S", 1)
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.create_connection(("127.0.0.1", port), timeout=channel.HANDSHAKE_S) as silent:
        begun = time.monotonic()
        while silent.recv(4096):  # its settings, and then the end; a timeout when there is none
            pass
        waited = time.monotonic() - begun
    server.stop(0)
    assert waited > 0.5, "it was not even given the time to speak"


@pytest.mark.real
def test_the_kernel_cuts_no_connection_whose_bytes_arrive_slowly() -> None:
    """Linux counts a closed window from its first probe: gRPC's keepalive timeout, which the socket has, is longer."""
    patience = set[int]()
    server = grpc.server(ThreadPoolExecutor(1), options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=client_options()) as client:
        grpc.channel_ready_future(client).result(BOUND_S)
        for number, _ in open_sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                if port in {at for _, at in places_of(number) or ()}:
                    patience.add(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    server.stop(0).wait(10)
    assert patience == {channel.CLOSED_WINDOW_S * 1000}
    assert channel.CLOSED_WINDOW_S > 2 * channel.CONNECTION_AGE_S, "a closed window may be one of an earlier round"


@pytest.mark.real
@pytest.mark.parametrize("watching", ["client", "server"])
def test_a_peer_that_is_gone_without_a_word_is_found(watching: str) -> None:
    """The kernel's patience is long, so pings find it; those of this test come and are missed sooner."""

    def options(side: str) -> list[tuple[str, int]]:
        deployed = dict(server_options() if side == "server" else client_options())
        soon = {"grpc.keepalive_time_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
        assert soon.keys() <= deployed.keys()
        return list((deployed | (soon if side == watching else {})).items())

    ended = threading.Event()

    def held(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(ended.set)
        yield from requests

    handler = grpc.stream_stream_rpc_method_handler(held)  # type: ignore[type-var]
    server = grpc.server(ThreadPoolExecutor(1), options=options("server"))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a", {"b": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    asked: SimpleQueue[bytes] = SimpleQueue()
    asked.put(b"hello")
    with SlowLine(f"127.0.0.1:{port}", rate=1e6, delay=0.001) as line:
        with grpc.insecure_channel(line.address, options=options("client")) as client:
            call = client.stream_stream("/a/b")(iter(asked.get, b""))
            assert next(call) == b"hello"
            line.is_cut = True
            if watching == "client":
                with pytest.raises(grpc.RpcError, match="ping timeout"):
                    next(call)
            else:
                assert ended.wait(BOUND_S)
            asked.put(b"")
        line.is_cut = False
    server.stop(0).wait(10)
