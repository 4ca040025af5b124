"""The protocol's limits and the gRPC options of both ends, which use the same numbers.

A message is at most 4 MiB; bulk bytes are sent in chunks of 1 MiB, and each transfer has a few of them in flight.
Keepalive detects a silent peer within 80 s, even if its machine has lost power.
"""

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

from atoll.ground.address import bracketed, is_loopback, parsed
from atoll.protocol.settings import ConfigError

PROTOCOL = 1
"""Version of the protocol, sent in `Hello.protocol`."""

MIB = 2**20
MESSAGE_BYTES_MAX = 4 * MIB
CHUNK_BYTES = 1 * MIB
UPLOAD_WINDOW_BYTES = 4 * MIB
"""Largest number of bytes of one upload in flight, sent but not confirmed; fewer among many uploads, see
`upload_window`."""

DOWNLOAD_WINDOW_BYTES = 6 * MIB
"""Credit of one download beyond the bytes that have arrived [bytes]; bytes in flight when it is cut are sent again."""

GRANT_BYTES = 4 * MIB
"""Credit that a download grants at once [bytes]; granting it for each chunk would cost nearly as much as the chunk."""

INLINE_BYTES_MAX = 16 * 1024
"""Largest model that is included in its invitation, and largest update that is included in its UploadOpen [bytes]: a
separate transfer would cost more."""

CONNECTIONS_MAX = 2100
METADATA_BYTES_MAX = 8 * 1024
STREAMS_MAX = 8
"""Largest number of RPCs that one connection has open at once; further ones wait at their caller. An agent needs four;
a hostile client's calls beyond the limit are refused before Python sees them."""

KEEPALIVE_S = 20
PING_ANSWER_S = 60
"""Time within which a peer must answer a ping [s]: on a slow line the answer waits behind the queued bytes, at most
`UNSENT_BYTES` and one chunk."""

UNSENT_BYTES = 128 * 1024
"""Largest number of bytes that a server's operating system buffers for one connection. With its default, 4 MiB, a
ping's answer waits for 256 s at 16 KiB/s, and the sender of a download does not notice a slow line."""

CLOSED_WINDOW_S = 1800
"""Time after which the kernel cuts a connection whose peer's receive window has been closed since then [s].

gRPC sets the socket's TCP_USER_TIMEOUT to its keepalive timeout, and Linux counts this from the first probe of a closed
window. The count restarts only when a whole segment of up to 64 KiB fits the window, which never happens with small
buffers: bytes still arrive, or all arrived minutes ago, and yet the connection ends as "Connection timed out (110)".
With 10 s, a line of 20 kB/s was cut every 14 s. So this is longer than a connection is used for new calls, but short
enough that undelivered data of closed connections leaves the kernel. Only pings detect silence.
"""

HANDSHAKE_S = 10
PROOF_S = 5
"""Time within which a new connection must complete its TLS handshake [s]. Each silent connection of a flood occupies a
slot for this time: during such a flood a round took up to 9 s with 10 s, and 5 s with this value."""

CONNECTION_AGE_S = 600
"""Age after which a server accepts a client's new calls only on a new connection, which authenticates again [s].
Running calls continue: a long transfer, or a control stream, whose caller is checked while it lasts."""

Option = tuple[str, int | str]
Options = list[Option]

_BOTH: Options = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", CLOSED_WINDOW_S * 1000),
    ("grpc.http2.ping_timeout_ms", PING_ANSWER_S * 1000),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: 64 KiB of a compressed message inflate to 64 MiB
    ("grpc.http2.max_pings_without_data", 0),  # 0: no limit; a client that trains sends little else
]


def server_options(over: Iterable[Option] = (), *, connections_max: int = CONNECTIONS_MAX) -> Options:
    """Return the gRPC options of a server.

    PINGs are not limited: an answer costs 0.1 us, and a peer that does not read its answers is no longer read from.
    With a limit, gRPC closes an offending connection once for every PING read, each time with a longer reason, until
    the peer reads: a single peer that read nothing kept a processor busy for 47 s.

    Args:
        over: options that replace those of the same name.
        connections_max: largest number of connections of a port, including unfinished handshakes, which cost 50 kB
            each. Further ones are closed at once.
    """
    options = [
        *_BOTH,
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail to bind, not share it
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server_handshake_timeout_ms", PROOF_S * 1000),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_S * 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    return _replaced(options, over)


def client_options(over: Iterable[Option] = ()) -> Options:
    """Return the gRPC options of a channel; those of `over` replace the ones of the same name.

    gRPC's reconnection back-off is short: the caller times the redialling.
    """
    options = [
        *_BOTH,
        ("grpc.use_local_subchannel_pool", 1),  # a new channel means a new connection, with no inherited back-off
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # also the shortest timeout of one connection attempt
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),  # `identity/proxy` turns it on if a proxy is configured
    ]
    return _replaced(options, over)


def _replaced(options: Options, over: Iterable[Option]) -> Options:
    return list((dict(options) | dict(over)).items())  # gRPC uses the first of several options of one name


def parse_address(address: str) -> tuple[str, int]:
    """Parse `host:port`.

    Args:
        address: "coordinator.example.org:7070", "192.0.2.1:7070", "[2001:db8::1]:7070"; port 0: the system chooses.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigError: the address has another form.
    """
    try:
        return parsed(address)
    except ValueError as error:
        raise ConfigError([f"address {address[:300]!r}: {error}"]) from None


def loopback_only(address: str) -> tuple[str, int]:
    """Parse `host:port` and refuse a host other than this machine.

    Args:
        address: "127.0.0.1:7070" (any of 127.0.0.0/8), "localhost:7070" or "[::1]:7070"; port 0: the system chooses.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigError: the address has another form, or belongs to another machine.
    """
    host, port = parse_address(address)
    if not is_loopback(host):
        fault = f"address {address!r}: allowed: 127.0.0.1, localhost or [::1]; insecure connections stay on one machine"
        raise ConfigError([fault])
    return host, port


def check_stays_here(metrics: str) -> None:
    """Check that the metrics of an agent or a rank are on loopback.

    Raises:
        ValueError: they are on another interface.
    """
    if not is_loopback(parse_address(metrics)[0]):
        raise ValueError(
            f"metrics {metrics!r}: allowed: 127.0.0.1, localhost or [::1]; a collector on this machine, or "
            "OTEL_EXPORTER_OTLP_ENDPOINT, takes them elsewhere"
        )


def reached_as(address: str, public: str) -> str:
    """Return the address at which others reach a listener: on the host `public`, or unchanged if that is empty."""
    return f"{bracketed(public)}:{parse_address(address)[1]}" if public else address


def is_wildcard(address: str) -> bool:
    """Return whether an address stands for all interfaces of a machine."""
    return parse_address(address)[0] in ("0.0.0.0", "::")


def _valid(address: str) -> str:
    parsed(address)
    return address


Address = Annotated[str, AfterValidator(_valid)]
"""Type of a setting whose value `parse_address` accepts."""
