"""The authority: whose key signs everybody's certificates. A directory of its own, which may lie on another machine.

key.pem          needed only to enrol and to renew
certificate.pem  what everybody trusts
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atoll.aggregation.folders import sync_folder
from atoll.protocol.identity.certificates import (
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
    write_private,
)
from atoll.protocol.identity.names import Identity


@dataclass(frozen=True, slots=True)
class Renewal:
    """Who asks for a further certificate: the one that it has, and its key's word that it wants the new one."""

    certificate_pem: bytes
    signature: bytes
    """ECDSA with SHA-256 by the older key, of the request."""


class Signer(Protocol):
    """Signs leaves: the authority itself, or the way to it."""

    @property
    def ca_pem(self) -> bytes:
        """What is to be trusted."""

    async def sign(self, request: bytes, identity: Identity, renewal: Renewal | None = None) -> bytes:
        """A certificate (PEM) for the key of a request.

        Args:
            request: PKCS #10; its names mean nothing.
            identity: whose it becomes.
            renewal: by what right, when its own older certificate is that.

        Raises:
            CertificateError: the request is none.
            AuthorityAway: the authority does not answer now.
            NotSigned: the authority does not want to.
        """


class AuthorityAway(OSError):
    """The authority's key lies elsewhere, and nobody answers there."""


class NotSigned(Exception):
    """The authority refuses; the text says why."""


class Authority:
    """An authority's directory, open. See `Signer`.

    Args:
        issuer: its certificate and key.
        lifetime_s: of the leaves that it signs.
    """

    def __init__(self, issuer: Issuer, lifetime_s: float = LIFETIME_S) -> None:
        self._issuer, self._lifetime_s = issuer, lifetime_s

    @property
    def ca_pem(self) -> bytes:
        """Its certificate."""
        return to_pem(self._issuer.certificate)

    async def sign(self, request: bytes, identity: Identity, renewal: Renewal | None = None) -> bytes:
        """Sign; see `Signer`. Whoever has this directory decides whose certificates it signs."""
        return self.issue(request, identity)

    def issue(self, request: bytes, identity: Identity) -> bytes:
        """A certificate (PEM) for the key of a request. Raises CertificateError, ValueError."""
        key = read_request(request)
        return to_pem(self._issuer.issue(key, identity, now=time.time(), lifetime_s=self._lifetime_s))

    @classmethod
    def create(cls, folder: Path, name: str, lifetime_s: float = LIFETIME_S) -> "Authority":
        """Make an authority in a new directory, or in an empty one.

        Raises:
            CredentialError: there is one already.
            OSError: the disk does not allow it.
        """
        if (folder / KEY).exists() or (folder / CERTIFICATE).exists():
            raise CredentialError([f"{folder} holds an authority already"])
        issuer = Issuer.create(name, now=time.time(), lifetime_s=AUTHORITY_LIFETIME_S)
        make_private_folder(folder)
        write_private(folder / CERTIFICATE, to_pem(issuer.certificate))
        write_private(folder / KEY, key_to_pem(issuer.key))
        sync_folder(folder)
        return cls(issuer, lifetime_s)

    @classmethod
    def open(cls, folder: Path, lifetime_s: float = LIFETIME_S) -> "Authority":
        """The authority in a directory.

        Raises:
            CredentialError: there is none, or it is damaged, or its key may be read by others.
        """
        try:
            if (mode := (folder / KEY).stat().st_mode) & 0o077:
                raise CredentialError([f"{folder / KEY} may be read by others (mode {mode & 0o777:03o}): chmod 600 it"])
            key, pem = read_key((folder / KEY).read_bytes()), (folder / CERTIFICATE).read_bytes()
            certificate = read_certificates(pem)[0]
        except FileNotFoundError as error:
            raise CredentialError([f"there is no {error.filename}: {folder} holds no authority"]) from None
        except CertificateError as error:
            raise CredentialError([f"{folder}: {error}"]) from None
        if not is_authority(pem):
            raise CredentialError([f"{folder} holds no authority, but the credential of a member: it can sign nothing"])
        if certificate.public_key() != key.public_key():
            raise CredentialError([f"{folder}: {KEY} does not fit to {CERTIFICATE}"])
        return cls(Issuer(certificate, key), lifetime_s)

    @classmethod
    def open_or_create(cls, folder: Path, name: str, lifetime_s: float = LIFETIME_S) -> "Authority":
        """The authority in a directory, a new one when that is not there. Raises as `open` and `create`.

        One that was cut while it was made has signed nothing, and is made anew; another certificate is somebody's.
        """
        if (folder / KEY).exists():
            return cls.open(folder, lifetime_s)
        with suppress(FileNotFoundError):
            if not is_authority((folder / CERTIFICATE).read_bytes()):
                raise CredentialError([f"{folder / CERTIFICATE} is no authority's: name another directory"])
            (folder / CERTIFICATE).unlink()
        return cls.create(folder, name, lifetime_s)

    def credential(self, identity: Identity) -> Credential:
        """A new key and the certificate for it, for somebody on this machine."""
        key = new_key()
        return Credential(key_to_pem(key), self.issue(make_request(key), identity), self.ca_pem)
