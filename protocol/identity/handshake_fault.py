"""The cause of a failed TLS handshake: which certificate is outside of its validity by this machine's clock.

gRPC passes on BoringSSL's message without the certificate's times; and if a server refuses this machine's certificate,
it reports only a closed connection, because in TLS 1.3 the dialling side finishes its handshake first. So this module
checks both certificates, this machine's and the one that the server shows.
"""

import os
import time

from atoll.protocol.identity.certificates import CertificateError, read_certificates, validity_of
from atoll.protocol.identity.clock_hint import out_of_time, refused_in_time, with_clock_hint
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.names import COORDINATOR, Identity
from atoll.protocol.identity.proxy import HttpProxy
from atoll.protocol.identity.shown_certificate import certificate_at
from atoll.protocol.settings import ConfigError

LOOK_S = 5.0
"""Time limit for fetching the server's certificate [s]."""

_FAILURES = "Tls handshake failed", "verification check failed"
"""gRPC's messages for an end that failed to prove its identity; a coordinator that is down gives the same status code,
UNAVAILABLE."""

_NO_TLS = "WRONG_VERSION_NUMBER"
"""BoringSSL's message for an answer that is no TLS."""

_NO_CONNECTION, _IN_HANDSHAKE = "failed to connect to all addresses", "Handshake read failed"
_CLOSED = "Socket closed", "Connection reset by peer"
"""gRPC's messages for a connection closed by its server; without `_IN_HANDSHAKE` the server has shown its
certificate."""


def is_handshake_failure(detail: str) -> bool:
    """Return whether gRPC's message says that one end did not accept the other's certificate."""
    return any(text in detail for text in _FAILURES) or _is_closed(detail)


async def explained(detail: str, address: str, own: Credential | None, server: Identity = COORDINATOR) -> str:
    """Return the cause of a failed handshake in words, or gRPC's message if both certificates are valid now.

    Args:
        detail: gRPC's message.
        address: host:port of the server.
        own: the credential that this machine has shown; None: the connection is insecure.
        server: the identity that the server should have proven.
    """
    if own is None:
        return await _of_insecure_end(detail, address, server)
    if not is_handshake_failure(detail):
        return detail
    if _NO_TLS in detail:
        way_out = "leave --insecure out at a coordinator there, or set it here"
        return f"{address} speaks no TLS, and this end wants certificates: {way_out}"
    now = time.time()
    if (fault := own_fault(own, now)) is not None:
        return fault
    try:
        shown = await certificate_at(address, HttpProxy.of(os.environ), server, timeout_s=LOOK_S)
        times = validity_of(read_certificates(shown)[0])
    except (OSError, TimeoutError, CertificateError, ConfigError):
        return with_clock_hint(detail, now)
    if not times.includes(now):
        return out_of_time(f"the certificate of the server at {address}", times, now, "the server must renew it")
    if _is_closed(detail):
        mine = validity_of(read_certificates(own.certificate_pem)[0])
        return refused_in_time(f"the certificate of {own.identity}", mine, now)
    return with_clock_hint(detail, now)


async def _of_insecure_end(detail: str, address: str, server: Identity) -> str:
    """Return that the server wants certificates, if it has closed a connection without TLS, or gRPC's message."""
    if not any(text in detail for text in _CLOSED):
        return detail
    try:
        await certificate_at(address, HttpProxy.of(os.environ), server, timeout_s=LOOK_S)
    except (OSError, TimeoutError, ConfigError):
        return detail
    return (
        f"{address} wants certificates, and this end is --insecure: enrol it with a join code, and leave --insecure out"
    )


def own_fault(own: Credential, now: float) -> str | None:
    """Return the fault of this machine's certificate or of its authority's; None: both are valid at `now` [s]."""
    mine = validity_of(read_certificates(own.certificate_pem)[0])
    if not mine.includes(now):
        remedy = "enrol again, with a new join code"
        return out_of_time(f"this machine's certificate, of {own.identity},", mine, now, remedy)
    authorities = [validity_of(authority) for authority in read_certificates(own.ca_pem)]
    if not any(times.includes(now) for times in authorities):
        remedy = "the federation needs a new authority"
        return out_of_time("the certificate of the federation's authority", authorities[0], now, remedy)
    return None


def _is_closed(detail: str) -> bool:
    is_after_handshake = _NO_CONNECTION in detail and _IN_HANDSHAKE not in detail
    return is_after_handshake and any(text in detail for text in _CLOSED)
