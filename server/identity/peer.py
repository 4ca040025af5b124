"""Who is calling: the identity in the certificate that the caller's TLS handshake has proven."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
from cryptography import x509

from atoll.protocol.identity.names import Identity

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a call."""

    identity: Identity
    serial: int
    """Of its certificate, for revocation."""
    expires_at: float = math.inf
    """Of its certificate [s since the epoch]: TLS looks at that when a connection is opened, and never again."""


def peer_of(context: Context) -> Peer | None:
    """The caller; None when it has shown no certificate that names a member (a plain connection, an enrolment)."""
    pems = context.auth_context().get("x509_pem_cert")
    return _peer_of_pem(next(iter(pems))) if pems else None


@lru_cache(4096)
def _peer_of_pem(pem: bytes) -> Peer | None:
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1:
            return None
        expires_at = certificate.not_valid_after_utc.timestamp()
        return Peer(Identity.parse(uris[0]), certificate.serial_number, expires_at)
    except (x509.ExtensionNotFound, ValueError):
        return None
