"""The caller of a call: the identity in the certificate that its TLS handshake has proven."""

import math
import re
from dataclasses import dataclass
from urllib.parse import unquote

from atoll.protocol.identity.certificates import CertificateError, read_leaf
from atoll.protocol.identity.names import Identity
from atoll.server.transport.interceptor import Context


@dataclass(frozen=True, slots=True)
class Peer:
    """Other end of a call."""

    identity: Identity
    serial: int
    """The serial number of its certificate, for revocation."""
    expires_at: float = math.inf
    """The expiry of its certificate [s since the epoch]; TLS checks it only when a connection is opened."""


def address_of(peer: str) -> str:
    """Return the address of a caller as host:port, from gRPC's string for it ("ipv4:127.0.0.1:4711").

    Behind a proxy or a NAT the host is the proxy or the router.
    """
    return re.sub(r"^ipv[46]:", "", unquote(peer))


def peer_of(context: Context) -> Peer | None:
    """Return the caller; None if it has shown no certificate of a member (an insecure connection, an enrolment)."""
    pems = context.auth_context().get("x509_pem_cert")
    if not pems:
        return None
    try:
        leaf = read_leaf(next(iter(pems)))
    except CertificateError:
        return None
    return Peer(leaf.identity, leaf.serial, leaf.expires_at)
