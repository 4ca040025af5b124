"""The certificate authority: its key signs all certificates. Its directory may be on another machine.

key.pem          its key, needed only for enrolment and renewal
certificate.pem  its certificate, which all members trust
next/            its successor, see `succession`
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.ground.backoff import Temporary
from atoll.ground.durable import write_private
from atoll.ground.folders import sync_folder
from atoll.protocol.identity.certificates import (
    AUTHORITY_EARLY_S,
    AUTHORITY_LIFETIME_S,
    LIFETIME_S,
    CertificateError,
    Issuer,
    is_authority,
    key_to_pem,
    make_request,
    new_key,
    read_certificates,
    read_key,
    read_request,
    to_pem,
)
from atoll.protocol.identity.credential import (
    CERTIFICATE,
    KEY,
    Credential,
    CredentialError,
    make_private_folder,
)
from atoll.protocol.identity.names import Identity
from atoll.server.identity.succession import Succession, prepare, settle


@dataclass(frozen=True, slots=True)
class Renewal:
    """Grounds of a renewal: the older certificate, and a signature by its key."""

    certificate_pem: bytes
    signature: bytes
    """ECDSA signature with SHA-256 of the request, by the older key."""


class Signer(Protocol):
    """Signer of leaf certificates: the authority itself, or a connection to it."""

    @property
    def ca_pem(self) -> bytes:
        """The certificates of the trusted authorities (PEM)."""

    @property
    def cross_pem(self) -> bytes:
        """The certificates with which older authorities vouch for newer ones (PEM), or empty."""

    async def sign(self, request: bytes, identity: Identity, renewal: Renewal | None = None) -> bytes:
        """Sign a certificate (PEM) for the key of a request.

        Args:
            request: the request (PKCS #10); the names in it are ignored.
            identity: the identity that the certificate is for.
            renewal: the older certificate and the consent of its key, if this is a renewal.

        Raises:
            CertificateError: the request is malformed.
            AuthorityAway: the authority does not answer now.
            NotSigned: the authority refuses.
        """


class AuthorityAway(Temporary, OSError):
    """Error: the authority's key is on another machine, which does not respond."""


class NotSigned(Exception):
    """Error: the authority refuses; the text has the reason."""


class Authority:
    """Open directory of an authority; see `Signer`.

    Args:
        issuer: its certificate and key.
        lifetime_s: the lifetime of the certificates that it signs [s].
        succession: its replacement, if one is under way.
    """

    def __init__(self, issuer: Issuer, lifetime_s: float = LIFETIME_S, succession: Succession | None = None) -> None:
        self._issuer, self._lifetime_s, self.succession = issuer, lifetime_s, succession

    @property
    def ca_pem(self) -> bytes:
        """The authority's certificate (PEM), during a replacement with its successor's, and then only the latter."""
        succession = self.succession
        if succession is None:
            return to_pem(self._issuer.certificate)
        newest = succession.issuer.certificate
        return to_pem(newest) if time.time() >= succession.ends_at else to_pem(self._issuer.certificate, newest)

    @property
    def cross_pem(self) -> bytes:
        """The certificate with which the authority vouches for its successor (PEM), or empty."""
        return b"" if self.succession is None else self.succession.cross_pem

    def prepare_next(self, folder: Path, name: str) -> bytes:
        """Make the next authority in this one's directory, and return its certificate (PEM); raises as `prepare`."""
        return to_pem(prepare(self._issuer, folder, name, time.time()).certificate)

    async def sign(self, request: bytes, identity: Identity, renewal: Renewal | None = None) -> bytes:
        """Sign a certificate, see `Signer`; access to this directory implies the right to have any signed."""
        return self.issue(request, identity)

    def issue(self, request: bytes, identity: Identity) -> bytes:
        """Issue a certificate (PEM) for the key of a request.

        Raises:
            CertificateError: the request is malformed.
            ValueError: the identity cannot have a certificate.
        """
        key, now, issuer = read_request(request), time.time(), self._issuer
        if self.succession is not None and now >= self.succession.signs_from:
            issuer = self.succession.issuer
        return to_pem(issuer.issue(key, identity, now=now, lifetime_s=self._lifetime_s))

    @classmethod
    def create(cls, folder: Path, name: str, lifetime_s: float = LIFETIME_S) -> "Authority":
        """Create an authority in a new or empty directory.

        Raises:
            CredentialError: the directory already has an authority.
            OSError: a file cannot be written.
        """
        if (folder / KEY).exists() or (folder / CERTIFICATE).exists():
            raise CredentialError([f"{folder} holds an authority already"])
        issuer = Issuer.create(name, now=time.time(), lifetime_s=AUTHORITY_LIFETIME_S, early_s=AUTHORITY_EARLY_S)
        make_private_folder(folder)
        write_private(folder / CERTIFICATE, to_pem(issuer.certificate))
        write_private(folder / KEY, key_to_pem(issuer.key))
        sync_folder(folder)
        return cls(issuer, lifetime_s)

    @classmethod
    def open(cls, folder: Path, lifetime_s: float = LIFETIME_S, *, begins: bool = False) -> "Authority":
        """Open the authority in a directory.

        Args:
            folder: the directory.
            lifetime_s: the lifetime of the certificates that it signs [s].
            begins: whether it serves members from now on, so that a prepared replacement begins, and a completed one is
                settled.

        Raises:
            CredentialError: the authority is missing or damaged, or others may read its key.
        """
        try:
            if (mode := (folder / KEY).stat().st_mode) & 0o077:
                raise CredentialError([f"{folder / KEY} may be read by others (mode {mode & 0o777:03o}): chmod 600 it"])
            now = time.time()
            succession = Succession.load(folder, lifetime_s, begins_at=now if begins else None)
            if succession is not None and begins and now >= succession.ends_at:
                settle(folder)
                succession = None
            key, pem = read_key((folder / KEY).read_bytes()), (folder / CERTIFICATE).read_bytes()
            certificate = read_certificates(pem)[0]
        except FileNotFoundError as error:
            raise CredentialError([f"there is no {error.filename}: {folder} holds no authority"]) from None
        except CertificateError as error:
            raise CredentialError([f"{folder}: {error}"]) from None
        if not is_authority(pem):
            raise CredentialError([f"{folder} holds no authority, but the credential of a member: it can sign nothing"])
        if certificate.public_key() != key.public_key():
            raise CredentialError([f"{folder}: {KEY} is not the key of {CERTIFICATE}"])
        return cls(Issuer(certificate, key), lifetime_s, succession)

    @classmethod
    def open_or_create(cls, folder: Path, name: str, lifetime_s: float = LIFETIME_S) -> "Authority":
        """Open the authority in a directory, or create a missing one. Raises the errors of `open` and `create`.

        An authority without its key was interrupted at its creation and has signed nothing, so it is created again. A
        directory with a member's certificate is refused.
        """
        if (folder / KEY).exists():
            return cls.open(folder, lifetime_s, begins=True)
        with suppress(FileNotFoundError):
            if not is_authority((folder / CERTIFICATE).read_bytes()):
                raise CredentialError([f"{folder / CERTIFICATE} is not an authority's: name another directory"])
            (folder / CERTIFICATE).unlink()
        return cls.create(folder, name, lifetime_s)

    def credential(self, identity: Identity) -> Credential:
        """Make a new key and its certificate, for an owner on this machine."""
        key = new_key()
        return Credential(key_to_pem(key), self.issue(make_request(key), identity), self.ca_pem)
