r"""The long-lived key of a site, by which other sites know it in secure sums.

Certificates are renewed every few weeks, so a peer pins this key instead: Ed25519 (RFC 8032), made from the operating
system's randomness at the agent's first start, and certified by the key of the client's certificate of that time:

    ECDSA(key of the certificate, b"atoll.v1 site key\n" + {"key": hex, "name": the client's name})

A fingerprint is the first 16 bytes of the SHA-256 of the raw key, as 32 hexadecimal digits in groups of four.
"""

import hashlib
import json

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.protocol.identity.certificates import CertificateError, PrivateKey, certified_key, check_issued, read_leaf
from atoll.protocol.identity.clock_hint import SKEW_S
from atoll.protocol.identity.names import Role
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure.messages import SiteIdentity

KEY_BYTES = 32
FINGERPRINT_DIGITS = 32
_DOMAIN = b"atoll.v1 site key\n"


def certify(name: str, key: bytes, certificate_key: PrivateKey, certificate: bytes) -> SiteIdentity:
    """Certify a site key with the key of the client's certificate."""
    return SiteIdentity(key, certificate, certificate_key.sign(_statement(name, key), ec.ECDSA(hashes.SHA256())))


def check_certified(identity: SiteIdentity, name: str, ca_pem: bytes, now: float) -> None:
    """Check that the client of this name has certified the key.

    Args:
        identity: of the site.
        name: of the client.
        ca_pem: certificates of the authorities that this site trusts.
        now: [s since the epoch].

    Raises:
        NotTrusted: it has not; the text says why.
    """
    try:
        leaf = read_leaf(identity.certificate)
        key = certified_key(identity.certificate)
        check_issued(identity.certificate, ca_pem, key)
    except CertificateError as error:
        raise NotTrusted(f"the certificate of {name}: {error}") from None
    if (leaf.identity.role, leaf.identity.name) != (Role.CLIENT, name):
        raise NotTrusted(f"the site key of {name} is certified by {leaf.identity}; allowed: the client {name}")
    if not leaf.issued_at - SKEW_S <= now <= leaf.expires_at:
        raise NotTrusted(f"the certificate of {name} is not valid now")
    try:
        key.verify(identity.certification, _statement(name, identity.key), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise NotTrusted(f"the site key of {name} is not signed by the key of its certificate") from None


def is_signed(key: bytes, content: bytes, signature: bytes) -> bool:
    """Return whether the owner of a site key has signed a content."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a site key: 32 hexadecimal digits, which `shown` groups."""
    return hashlib.sha256(key).hexdigest()[:FINGERPRINT_DIGITS]


def shown(digits: str) -> str:
    """Return a fingerprint in groups of four digits, to be read out."""
    return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))


def _statement(name: str, key: bytes) -> bytes:
    return _DOMAIN + json.dumps({"key": key.hex(), "name": name}, sort_keys=True, separators=(",", ":")).encode()
