"""X.509 certificates (RFC 5280): of an authority, the leaves that it signs, and the requests for leaves.

Keys are ECDSA P-256, because gRPC's TLS refuses Ed25519. A leaf names one identity, as its only URI, and its usage:
proof of identity when dialling (clientAuth), when listening (serverAuth), or both. A leaf that listens also has a DNS
name, derived from its identity, which dialling sides check: so certificates contain no address, and only the
coordinator can listen as the coordinator.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.ground.printable import count_of
from atoll.ground.private_key import private_key_in
from atoll.ground.text_files import wide_encoding
from atoll.protocol.identity.clock_hint import Validity
from atoll.protocol.identity.names import Identity, Role

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

LIFETIME_S = 30 * 86400.0
"""Default lifetime of a leaf [s]."""

AUTHORITY_LIFETIME_S = 10 * 365 * 86400.0
AUTHORITY_EARLY_S = 365 * 86400.0
"""Time by which an authority is valid before it is made [s]: the clock that made it may have been ahead, and an
authority is never renewed."""

SKEW_S = 300
"""Time by which a certificate is valid before it is issued, because clocks differ [s]."""

REQUEST_BYTES_MAX = 4096
PEM_BYTES_MAX = 64 * 1024

_DIALS, _LISTENS = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
USAGES = {
    Role.OWNER: (_DIALS,),
    Role.OPERATOR: (_DIALS,),
    Role.AUDITOR: (_DIALS,),
    Role.CLIENT: (_DIALS,),
    Role.COORDINATOR: (_DIALS, _LISTENS),  # it dials its ranks
    Role.AGGREGATOR: (_DIALS, _LISTENS),
    Role.AUTHORITY: (_DIALS,),
}
"""Usages of each role's certificates."""

_CONSENT = b"atoll renewal\0"

_SERVER_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


_UNREADABLE = (
    *(ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion),
    *(x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType),
)
"""Errors of `cryptography` about bytes that are not a certificate or request, or are of an unknown kind."""


class CertificateError(ValueError):
    """Error: bytes are not a certificate, key or request of the allowed form; the text names the fault."""


# ---------------------------------------------------------------- keys


def new_key() -> PrivateKey:
    """Make a private key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: PrivateKey) -> bytes:
    """Return a private key as PEM (PKCS #8, not encrypted)."""
    private = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())


def read_key(pem: bytes) -> PrivateKey:
    """Read the private key of a PEM file.

    Raises:
        CertificateError: the file has no key, or an encrypted one, or one not on P-256.
    """
    _refuse_wide(pem)
    try:
        key = private_key_in(pem)
    except ValueError as error:
        raise CertificateError(str(error)) from error
    if not (isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1)):
        raise CertificateError("a private key of another kind; allowed: ECDSA on P-256")
    return key


# ---------------------------------------------------------------- requests


def make_request(key: PrivateKey) -> bytes:
    """Make a request for a certificate (PKCS #10, DER) without a name, signed as proof of possession of the key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def read_request(request: bytes) -> PublicKey:
    """Return the public key of a request for a certificate; its names and extensions are ignored.

    Raises:
        CertificateError: the bytes are not a request, too long, for a key not on P-256, or not signed by that key.
    """
    if len(request) > REQUEST_BYTES_MAX:
        raise CertificateError(f"request of {count_of(len(request), 'byte')}; allowed: at most {REQUEST_BYTES_MAX}")
    _refuse_wide(request)
    try:
        parsed = x509.load_der_x509_csr(request)
        key = parsed.public_key()
        is_signed = parsed.is_signature_valid
    except _UNREADABLE as error:
        raise CertificateError("no certificate request (PKCS #10, DER)") from error
    if not _is_p256(key):
        raise CertificateError("a request for a key of another kind; allowed: ECDSA on P-256")
    if not is_signed:
        raise CertificateError("the request is not signed by the key that it names")
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def key_fingerprint(key: PublicKey) -> str:
    """Return the SHA-256 of a public key (DER), hexadecimal."""
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(*form)).hexdigest()


def consent(key: PrivateKey, request: bytes) -> bytes:
    """Sign a request with an older key, as its owner's consent to a certificate for the new key."""
    return key.sign(_CONSENT + request, ec.ECDSA(hashes.SHA256()))


def check_consent(certificate_pem: bytes, request: bytes, signature: bytes) -> None:
    """Check a consent signature with the key of the older certificate; raises CertificateError."""
    key = certified_key(certificate_pem)
    try:
        key.verify(signature, _CONSENT + request, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise CertificateError("the request is not signed by the key of the older certificate") from None


# ---------------------------------------------------------------- certificates


@dataclass(frozen=True, slots=True)
class Issuer:
    """Authority that signs leaves: a certificate and its key."""

    certificate: x509.Certificate
    key: PrivateKey = field(repr=False)

    @classmethod
    def create(
        cls, name: str, *, now: float, lifetime_s: float = AUTHORITY_LIFETIME_S, early_s: float = SKEW_S
    ) -> Self:
        """Make an authority with a self-signed certificate; `name` is for people.

        Args:
            name: the name of the authority.
            now: seconds since the epoch.
            lifetime_s: the lifetime of the certificate, from `now` on.
            early_s: time by which its validity begins before `now` [s].
        """
        key = new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            _builder(key.public_key(), subject, subject, now, lifetime_s, early_s)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    def issue(
        self, key: PublicKey, identity: Identity, *, now: float, lifetime_s: float = LIFETIME_S
    ) -> x509.Certificate:
        """Sign a leaf for a key, valid from `now` - `SKEW_S` to `now` + `lifetime_s`.

        Args:
            key: public key of the leaf's owner.
            identity: the identity of the owner.
            now: seconds since the epoch.
            lifetime_s: the lifetime of the leaf; it never outlives the authority's certificate.

        Raises:
            ValueError: the name is not allowed for a server.
            CertificateError: the authority's certificate has expired.
        """
        alternative: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
        usages = USAGES[identity.role]
        if _LISTENS in usages:
            alternative.append(x509.DNSName(server_name(identity)))
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        end = min(now + lifetime_s, self.certificate.not_valid_after_utc.timestamp())
        if end <= now:
            raise CertificateError(f"the authority's certificate has expired on {self.certificate.not_valid_after_utc}")
        builder = (
            _builder(key, _subject(identity), self.certificate.subject, now, end - now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=True)
            .add_extension(own, critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())

    def vouch(self, other: x509.Certificate, *, now: float) -> x509.Certificate:
        """Certify the key of the next authority: members that trust this authority then trust the next.

        TLS builds no path through this certificate: it only makes members trust the next authority's self-signed
        certificate.
        """
        key = other.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        lifetime = self.certificate.not_valid_after_utc.timestamp() - now
        builder = _builder(key, other.subject, self.certificate.subject, now, max(lifetime, 1.0))
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        return builder.add_extension(constraints, critical=True).sign(self.key, hashes.SHA256())


def vouched(ca_pem: bytes, cross_pem: bytes, trusted_pem: bytes) -> bytes:
    """Return the authorities that are already trusted, or whose key a trusted one has certified (`Issuer.vouch`).

    Args:
        ca_pem: authorities named by a coordinator.
        cross_pem: certificates in which authorities vouch for their successors; may be empty.
        trusted_pem: the authorities that are trusted now.

    Raises:
        CertificateError: no authority is left, or a file is malformed.
    """
    trusted = {*read_certificates(trusted_pem)}
    crosses = [*read_certificates(cross_pem)] if cross_pem else []
    found = []
    for authority in read_certificates(ca_pem):
        name, key = authority.subject, authority.public_key()
        of_it = [cross for cross in crosses if cross.subject == name and cross.public_key() == key]
        if authority in trusted or any(_is_issued_by(cross, each) for cross in of_it for each in trusted):
            found.append(authority)
    if not found:
        raise CertificateError("the authority differs from the trusted one, which has not vouched for it")
    return to_pem(*found)


def _builder(
    key: PublicKey, subject: x509.Name, issuer: x509.Name, now: float, lifetime_s: float, early_s: float = SKEW_S
) -> x509.CertificateBuilder:
    begin = math.floor(now) - early_s  # certificates have whole seconds
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(begin, UTC))
        .not_valid_after(datetime.fromtimestamp(math.ceil(now + lifetime_s), UTC))
    )


def _subject(identity: Identity) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])


def server_name(identity: Identity) -> str:
    """Return the DNS name of a server, which dialling sides check: `main.coordinator.atoll.internal`.

    Raises:
        ValueError: the role does not listen, or the name has characters that are not safe in DNS.
    """
    if _LISTENS not in USAGES[identity.role]:
        raise ValueError(f"{identity} does not listen; only coordinator and aggregator do")
    if not set(identity.name) <= _SERVER_NAME:
        raise ValueError(f"name {identity.name!r} of a server: allowed are a-z, 0-9 and -")
    return f"{identity.name}.{identity.role}.atoll.internal"


def to_pem(*certificates: x509.Certificate) -> bytes:
    """Return certificates as one PEM file."""
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def read_certificates(pem: bytes) -> Sequence[x509.Certificate]:
    """Return the certificates of a PEM file, at least one; raises CertificateError."""
    if len(pem) > PEM_BYTES_MAX:
        raise CertificateError(f"{count_of(len(pem), 'byte')} of certificates; allowed: at most {PEM_BYTES_MAX}")
    _refuse_wide(pem)
    try:
        return x509.load_pem_x509_certificates(pem)
    except _UNREADABLE as error:
        raise CertificateError("no certificates in PEM") from error


def _refuse_wide(content: bytes) -> None:
    """Refuse a file that an editor or PowerShell has saved in another encoding.

    Raises:
        CertificateError: the file is UTF-16 or UTF-32.
    """
    if encoding := wide_encoding(content):
        raise CertificateError(f"is {encoding}; save it as UTF-8, or copy the original file unchanged")


def is_authority(pem: bytes) -> bool:
    """Return whether the first certificate of a PEM file is an authority's."""
    try:
        constraints = read_certificates(pem)[0].extensions.get_extension_for_class(x509.BasicConstraints)
    except (CertificateError, *_UNREADABLE):
        return False
    return constraints.value.ca


def validity_of(certificate: x509.Certificate) -> Validity:
    """Return the period in which a certificate is valid."""
    return Validity(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def fingerprint(certificate: x509.Certificate) -> bytes:
    """Return the SHA-256 of a certificate (DER)."""
    return certificate.fingerprint(hashes.SHA256())


@dataclass(frozen=True, slots=True)
class Leaf:
    """Content of a leaf; times in seconds since the epoch. Validity begins `SKEW_S` before `issued_at`."""

    identity: Identity
    serial: int
    issued_at: float
    expires_at: float


@lru_cache(4096)  # every call of every peer reads it
def read_leaf(pem: bytes) -> Leaf:
    """Return the content of a PEM file's first certificate; its signature must have been checked before.

    Raises:
        CertificateError: the bytes are not a certificate, or it does not name exactly one identity.
    """
    certificate = read_certificates(pem)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except _UNREADABLE as error:
        raise CertificateError("the certificate has no readable subject alternative name") from error
    if len(uris) != 1:
        raise CertificateError(f"the certificate has {len(uris)} URIs; allowed: exactly one, atoll://ROLE/NAME")
    try:
        identity = Identity.parse(uris[0])
    except ValueError as error:
        raise CertificateError(str(error)) from None
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return Leaf(identity, certificate.serial_number, begin + SKEW_S if begin + SKEW_S < end else begin, end)


def certified_key(pem: bytes) -> PublicKey:
    """Return the public key of a PEM file's first certificate.

    Raises:
        CertificateError: the file has no certificate, or one for a key not on P-256.
    """
    try:
        key = read_certificates(pem)[0].public_key()
    except CertificateError:
        raise
    except _UNREADABLE as error:
        raise CertificateError("the certificate has no readable key") from error
    if not _is_p256(key):
        raise CertificateError("a certificate for a key of another kind; allowed: ECDSA on P-256")
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def check_issued(leaf_pem: bytes, ca_pem: bytes, key: PublicKey) -> None:
    """Check that a leaf is for the key, is signed by one of the authorities, and has the usages of its role.

    The period of validity is not checked.

    Raises:
        CertificateError: one check fails; the text says which.
    """
    certificate = read_certificates(leaf_pem)[0]
    role = read_leaf(leaf_pem).identity.role
    if certified_key(leaf_pem) != key:
        raise CertificateError("the certificate is for another key")
    try:
        usages = set(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except _UNREADABLE:
        usages = set()
    if usages != set(USAGES[role]):
        raise CertificateError(f"the certificate's usages do not fit the role {role}")
    if not is_issued_by(leaf_pem, ca_pem):
        raise CertificateError("the certificate is not signed by this authority")


def is_issued_by(leaf_pem: bytes, ca_pem: bytes) -> bool:
    """Return whether a leaf is signed by one of the authorities; the period of validity is not checked.

    Raises:
        CertificateError: a file is not a certificate.
    """
    certificate = read_certificates(leaf_pem)[0]
    return any(_is_issued_by(certificate, authority) for authority in read_certificates(ca_pem))


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (*_UNREADABLE, InvalidSignature):
        return False
    return True


def _is_p256(key: object) -> bool:
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1)
