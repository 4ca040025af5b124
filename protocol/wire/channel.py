"""Limits, and the gRPC options of both ends: one place, so that both sides use the same numbers.

A message is at most 4 MiB; bulk bytes travel in chunks of 1 MiB, of which few are under way in each transfer. A
silent peer is noticed by keepalive within half a minute, also when its machine has lost power.
"""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from atoll.protocol.settings import ConfigError

PROTOCOL = 1
"""Version of the protocol; `Hello.protocol`."""

MIB = 2**20
MESSAGE_BYTES_MAX = 4 * MIB
CHUNK_BYTES = 1 * MIB
UPLOAD_WINDOW_BYTES = 4 * MIB
"""Bytes of one upload that may be sent and not yet confirmed; among many, less: see `windows`."""

DOWNLOAD_WINDOW_BYTES = 6 * MIB
"""Bytes of one download that are granted beyond those that have come: what of them is under way when it is cut is sent
again."""

GRANT_BYTES = 4 * MIB
"""A download is granted so much at once: a message for each chunk would cost nearly as much as the chunk."""

INLINE_BYTES_MAX = 16 * 1024
"""A model of so many bytes rides in the invitation, an update in its UploadOpen: a transfer would cost more."""

CONNECTIONS_MAX = 2100
METADATA_BYTES_MAX = 8 * 1024
STREAMS_MAX = 8
"""RPCs that one connection may have open at once: a further one waits at its caller. An agent needs four of them; what
a hostile one opens beyond them is refused before Python hears of it."""

METRICS_MAX = 100
STATISTICS_MAX = 10_000
"""Sums of all metrics together, that a client sends at once."""

KEEPALIVE_S = 20
KEEPALIVE_TIMEOUT_S = 10
HANDSHAKE_S = 10
PROOF_S = 5
"""A server waits so long until a new connection has proven who it is. For so long each of a flood of silent ones keeps
its place from those who must dial anew: with 10 s a round beside such a flood took up to 9 s, with these 5 s."""

CONNECTION_AGE_S = 600
"""After so long a server takes new calls of a client on a new connection only, which proves anew who it is. What is
under way goes on: a long transfer, a control stream, whose caller is looked at while it lasts."""

HOST_CHARACTERS_MAX = 253

Options = list[tuple[str, int]]

_BOTH: Options = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: 64 KiB of a compressed message inflate to 64 MiB
    ("grpc.http2.max_pings_without_data", 0),  # 0: no limit; a client that trains sends little else
]


def server_options(*, connections_max: int = CONNECTIONS_MAX) -> Options:
    """The options of a server.

    There is no limit to PINGs: an answer costs 0.1 us, and while the peer takes none, nothing more of its is read. With
    one, gRPC closes a connection beyond it anew for every PING that it has read already, each time with a longer
    reason, until what it is writing is taken: a single peer that read nothing kept a processor busy for 47 s.

    Args:
        connections_max: connections of a port, those included that have not proven anything yet: each of them costs
            50 kB until its handshake has failed. Further ones are closed as they come.
    """
    return [
        *_BOTH,
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.so_reuseport", 0),  # a second server on the same port must fail to bind, not share it
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        ("grpc.server_handshake_timeout_ms", PROOF_S * 1000),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_S * 1000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def client_options() -> Options:
    """The options of a channel. The caller decides when to dial again: gRPC's own back-off stays below its."""
    return [
        *_BOTH,
        ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection, with no back-off inherited
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # also the least time that one attempt to connect is given
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_http_proxy", 0),  # only who asks for one goes over a proxy: see `proxy`
    ]


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


def parse_address(address: str) -> tuple[str, int]:
    """Parse `host:port`.

    Args:
        address: "coordinator.example.org:7070", "192.0.2.1:7070", "[2001:db8::1]:7070"; port 0: the system chooses.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigError: not of that form.
    """
    try:
        return _parse(address)
    except ValueError as error:
        raise ConfigError([f"address {address[:300]!r}: {error}"]) from None


def loopback_only(address: str) -> tuple[str, int]:
    """Parse `host:port` and refuse a host that is not this machine.

    Args:
        address: "127.0.0.1:7070" (any of 127.0.0.0/8), "localhost:7070" or "[::1]:7070"; port 0: the system chooses.

    Returns:
        Host, without brackets, and port.

    Raises:
        ConfigError: not of that form, or another host.
    """
    host, port = parse_address(address)
    if not _is_loopback(host):
        fault = f"address {address!r}: allowed: 127.0.0.1, localhost or [::1]; what is insecure stays on one machine"
        raise ConfigError([fault])
    return host, port


def bracketed(host: str) -> str:
    """A host as it stands before its port."""
    return f"[{host}]" if ":" in host else host


def reached_as(address: str, public: str) -> str:
    """Where others find what listens on an address, given by which host they know this machine; empty: by that one."""
    return f"{bracketed(public)}:{parse_address(address)[1]}" if public else address


def is_wildcard(address: str) -> bool:
    """Whether it stands for every interface of a machine."""
    return parse_address(address)[0] in ("0.0.0.0", "::")


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise ValueError("allowed: host:port, with a port in 0..65535")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (_is_ipv6(bare) if bare != host else _is_name_or_ipv4(host)):
        raise ValueError("allowed: host:port, where host is a name, an IPv4 address or an IPv6 address in brackets")
    return bare, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        return False


def _is_name_or_ipv4(host: str) -> bool:
    if not host.rpartition(".")[2].isdigit():
        return len(host) <= HOST_CHARACTERS_MAX and _HOST_NAME.fullmatch(host) is not None
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    if isinstance(address, ipaddress.IPv6Address):
        return address == ipaddress.IPv6Address("::1")
    return address.is_loopback


def _valid(address: str) -> str:
    _parse(address)
    return address


Address = Annotated[str, AfterValidator(_valid)]
"""The type of a setting that `parse_address` will parse."""
