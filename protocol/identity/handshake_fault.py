"""The cause of a failed TLS handshake: which certificate is outside of its time by this machine's clock.

gRPC gives the text of BoringSSL without the certificate's times, and of a server that refuses this machine's
certificate no more than a closed connection: TLS 1.3 ends the handshake of the dialling side first. So the
certificates are looked at here, this machine's own and the one that the server shows.
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
"""Time for the look at the server's certificate [s]."""

_FAILURES = "Tls handshake failed", "verification check failed"
"""gRPC's texts for an end that failed to prove its identity; their code, UNAVAILABLE, is that of a coordinator that is
down, too."""

_NO_CONNECTION, _IN_HANDSHAKE = "failed to connect to all addresses", "Handshake read failed"
_CLOSED = "Socket closed", "Connection reset by peer"
"""gRPC's texts for a connection that its server has closed; without `_IN_HANDSHAKE` it has shown its certificate."""


def is_handshake_failure(detail: str) -> bool:
    """Return whether gRPC's text is about a connection on which one end did not accept the other's certificate."""
    return any(text in detail for text in _FAILURES) or _is_closed(detail)


async def explained(detail: str, address: str, own: Credential | None, server: Identity = COORDINATOR) -> str:
    """Return the cause of a failed handshake in words; gRPC's text where no certificate is outside of its time.

    Args:
        detail: gRPC's text.
        address: host:port of the server.
        own: the credential that this machine has shown; None: none, the connection is insecure.
        server: the identity that the server should have proven.
    """
    if own is None or not is_handshake_failure(detail):
        return detail
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


def own_fault(own: Credential, now: float) -> str | None:
    """Return the fault of this machine's own certificate, or of its authority's; None: both are valid at `now` [s]."""
    mine = validity_of(read_certificates(own.certificate_pem)[0])
    if not mine.includes(now):
        remedy = "enrol anew, with a new join code"
        return out_of_time(f"this machine's own certificate, of {own.identity},", mine, now, remedy)
    authorities = [validity_of(authority) for authority in read_certificates(own.ca_pem)]
    if not any(times.includes(now) for times in authorities):
        remedy = "the federation needs a new authority"
        return out_of_time("the certificate of the federation's authority", authorities[0], now, remedy)
    return None


def _is_closed(detail: str) -> bool:
    is_after_handshake = _NO_CONNECTION in detail and _IN_HANDSHAKE not in detail
    return is_after_handshake and any(text in detail for text in _CLOSED)
