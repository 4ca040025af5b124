"""The credential of a member, and the folder that stores it.

key.pem           private key, readable by its owner only; it never leaves this machine
certificate.pem   certificate for the key
ca.pem            trusted authorities
lock              locked by an operator's command while it renews; a process has a separate state directory instead

Although a credential has three files, replacing it is atomic: the new files are written beside the old ones, and the
rename of the key commits them. A reader uses the certificate that matches the key.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12

from atoll.ground.durable import write_private
from atoll.ground.file_lock import Locked, lock_file
from atoll.ground.folders import sync_folder
from atoll.protocol.identity.certificates import (
    SKEW_S,
    CertificateError,
    Leaf,
    check_issued,
    is_authority,
    read_certificates,
    read_key,
    read_leaf,
)
from atoll.protocol.identity.names import Identity
from atoll.protocol.settings import ConfigError

KEY, CERTIFICATE, AUTHORITIES = "key.pem", "certificate.pem", "ca.pem"
LOCK = "lock"
_NEW = ".new"

RENEW_AFTER = 2 / 3
"""Fraction of a certificate's lifetime after which it is renewed."""

RENEW_JITTER = 0.1
"""Largest fraction of the lifetime by which renewal is early, so that certificates issued together spread out."""


class CredentialError(ConfigError):
    """Error: a folder has no usable credential; the text says which file, and what to do."""


@dataclass(frozen=True, slots=True)
class Credential:
    """Private key, its certificate and the trusted authorities; all PEM, as gRPC takes them.

    Raises:
        CredentialError: key, certificate and authorities do not match.
    """

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    ca_pem: bytes
    leaf: Leaf = field(init=False)

    def __post_init__(self) -> None:
        try:
            check_issued(self.certificate_pem, self.ca_pem, self.key.public_key())
            object.__setattr__(self, "leaf", read_leaf(self.certificate_pem))
        except CertificateError as error:
            raise CredentialError([str(error)]) from None

    @property
    def identity(self) -> Identity:
        """Identity that the credential proves."""
        return self.leaf.identity

    @property
    def key(self) -> ec.EllipticCurvePrivateKey:
        """Private key, parsed."""
        return read_key(self.key_pem)

    def is_expired(self, now: float) -> bool:
        """Return whether the certificate has expired at `now` [s since the epoch]."""
        return now >= self.leaf.expires_at

    def is_early(self, now: float) -> bool:
        """Return whether the certificate is not valid yet at `now` [s since the epoch]: a clock is, or was, wrong."""
        return now < self.leaf.issued_at - SKEW_S

    def renew_at(self, jitter: float) -> float:
        """Return the instant at which the credential should be renewed [s since the epoch].

            issued_at + lifetime (RENEW_AFTER - RENEW_JITTER jitter),    lifetime = expires_at - issued_at

        Args:
            jitter: random, in [0, 1].
        """
        life = self.leaf.expires_at - self.leaf.issued_at
        return self.leaf.issued_at + life * (RENEW_AFTER - RENEW_JITTER * jitter)

    def to_pkcs12(self, passphrase: bytes) -> bytes:
        """Return key, certificate and authorities as one encrypted file for browsers (PKCS #12, RFC 7292).

        Args:
            passphrase: what the file is opened with, not empty.
        """
        certificate, *_ = read_certificates(self.certificate_pem)
        name, authorities = str(self.identity).encode(), read_certificates(self.ca_pem)
        how = serialization.BestAvailableEncryption(passphrase)
        return pkcs12.serialize_key_and_certificates(name, self.key, certificate, authorities, how)

    @staticmethod
    def load(folder: Path) -> "Credential":
        """Read the credential in a folder; during a replacement, the complete old or new one.

        Raises:
            CredentialError: the credential is missing or damaged, or other users may read its key.
        """
        for _ in range(3):  # files may be renamed between these reads
            key = _read_private(folder / KEY)
            for found, _ in _fitting(folder, key):
                return found
        raise CredentialError([_explain(folder, key)])

    def store(self, folder: Path) -> None:
        """Store the credential in a folder, durably; after a crash the folder has the old or the new one.

        Raises:
            CredentialError: the folder has an authority.
            OSError: the folder cannot be written.
        """
        spare_authority(folder)
        make_private_folder(folder)
        _settle(folder)
        write_private(folder / (CERTIFICATE + _NEW), self.certificate_pem)
        write_private(folder / (AUTHORITIES + _NEW), self.ca_pem)
        write_private(folder / (KEY + _NEW), self.key_pem)
        sync_folder(folder)
        for name in (KEY, CERTIFICATE, AUTHORITIES):
            os.replace(folder / (name + _NEW), folder / name)
        sync_folder(folder)


def _fitting(folder: Path, key: bytes) -> Iterator[tuple[Credential, Sequence[str]]]:
    """Yield the credentials in a folder that match a key, the settled one first, each with its files."""
    for certificate in (CERTIFICATE, CERTIFICATE + _NEW):
        for authorities in (AUTHORITIES, AUTHORITIES + _NEW):
            with suppress(OSError, CredentialError):
                contents = (folder / certificate).read_bytes(), (folder / authorities).read_bytes()
                yield Credential(key, *contents), (certificate, authorities)


def _settle(folder: Path) -> None:
    """Finish a replacement that was interrupted after the key's rename, before the next one overwrites its files."""
    with suppress(FileNotFoundError):
        for _, names in _fitting(folder, (folder / KEY).read_bytes()):
            for name in names:
                os.replace(folder / name, folder / name.removesuffix(_NEW))
            return sync_folder(folder)


def _explain(folder: Path, key: bytes) -> str:
    """Return the fault of the settled files, in words."""
    try:
        Credential(key, (folder / CERTIFICATE).read_bytes(), (folder / AUTHORITIES).read_bytes())
    except FileNotFoundError as error:
        return f"there is no {error.filename}: enrol first, with a join code"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except CredentialError as error:
        return f"{folder}: {error}"
    return f"{folder}: it was replaced while it was read; try again"


def _read_private(path: Path) -> bytes:
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except FileNotFoundError:
        raise CredentialError([f"there is no {path}: enrol first, with a join code"]) from None
    except OSError as error:
        raise CredentialError([f"{path} cannot be read: {error.strerror}"]) from error
    if mode & 0o077:
        raise CredentialError([f"{path} may be read by others (mode {mode & 0o777:03o}): chmod 600 {path}"])
    try:
        read_key(content)
    except CertificateError as error:
        raise CredentialError([f"{path}: {error}"]) from None
    return content


def spare_authority(folder: Path) -> None:
    """Refuse a folder with an authority (CredentialError): its files have the same names, and its key has no copy."""
    try:
        is_there = is_authority((folder / CERTIFICATE).read_bytes())
    except OSError:
        return
    if is_there:
        raise CredentialError([f"{folder} holds an authority, whose key would be lost: name another folder"])


@contextmanager
def alone_with(folder: Path) -> Iterator[bool]:
    """Hold the lock for a credential's replacement in the block, and yield True; two at once would mix their files.

    Yields False when another process holds it; the caller then continues with the present credential.
    """
    try:
        lock = lock_file(folder / LOCK)
    except Locked:
        yield False
        return
    try:
        yield True
    finally:
        os.close(lock)


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter; leave an existing one unchanged."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
