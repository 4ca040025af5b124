"""A credential: the folder in which somebody keeps who they are.

key.pem           the private key, readable by its owner only; it never leaves this machine
certificate.pem   the certificate for it
ca.pem            the authorities that are trusted
lock              held by the command of a person that renews it; others have a state directory that is theirs alone

Replacing one is atomic although these are three files: what is new is written beside what is old, and the key's
rename decides. Whoever reads takes the certificate that fits the key.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from atoll.aggregation.folders import sync_folder
from atoll.protocol.file_lock import Locked, lock_file
from atoll.protocol.identity.certificates import (
    CertificateError,
    Leaf,
    check_issued,
    is_authority,
    read_key,
    read_leaf,
)
from atoll.protocol.identity.names import Identity
from atoll.protocol.settings import ConfigError

KEY, CERTIFICATE, AUTHORITIES = "key.pem", "certificate.pem", "ca.pem"
LOCK = "lock"
_NEW = ".new"

RENEW_AFTER = 2 / 3
"""Of its life; a certificate is renewed then."""

RENEW_JITTER = 0.1
"""Of its life at most, earlier: those that were issued together are not renewed together."""


class CredentialError(ConfigError):
    """A folder that holds no usable credential; the text says which file, and what to do."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A key, the certificate for it and who is trusted; all PEM, as gRPC takes them.

    Raises:
        CredentialError: they do not belong together.
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
        """Who it proves."""
        return self.leaf.identity

    @property
    def key(self) -> ec.EllipticCurvePrivateKey:
        """The private key."""
        return read_key(self.key_pem)

    def is_expired(self, now: float) -> bool:
        """Whether its time is over; `now` in s since the epoch."""
        return now >= self.leaf.expires_at

    def renew_at(self, jitter: float) -> float:
        """When to renew it [s since the epoch]: at 2/3 of its life, a little earlier by a random jitter in 0..1.

        Its life begins when it was issued, not when it begins to be valid, which is some minutes before that.
        """
        life = self.leaf.expires_at - self.leaf.issued_at
        return self.leaf.issued_at + life * (RENEW_AFTER - RENEW_JITTER * jitter)

    @staticmethod
    def load(folder: Path) -> "Credential":
        """Read the credential in a folder; one that is being replaced meanwhile is the old or the new one, whole.

        Raises:
            CredentialError: it is not there, damaged, or its key may be read by others.
        """
        for _ in range(3):  # a key and a certificate that are renamed between our reads
            key = _read_private(folder / KEY)
            for found, _ in _fitting(folder, key):
                return found
        raise CredentialError([_explain(folder, key)])

    def store(self, folder: Path) -> None:
        """Put it into a folder, in place of what is there; durable when this returns, and old or new after a crash.

        Raises:
            CredentialError: an authority lies there.
            OSError: the disk does not allow it.
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
    """The credentials in a folder that belong to a key, the settled one first, and the files that each is read from."""
    for certificate in (CERTIFICATE, CERTIFICATE + _NEW):
        for authorities in (AUTHORITIES, AUTHORITIES + _NEW):
            with suppress(OSError, CredentialError):
                contents = (folder / certificate).read_bytes(), (folder / authorities).read_bytes()
                yield Credential(key, *contents), (certificate, authorities)


def _settle(folder: Path) -> None:
    """Finish a replacing that was cut after its key had got its name; the next one writes over what it reads."""
    with suppress(FileNotFoundError):
        for _, names in _fitting(folder, (folder / KEY).read_bytes()):
            for name in names:
                os.replace(folder / name, folder / name.removesuffix(_NEW))
            return sync_folder(folder)


def _explain(folder: Path, key: bytes) -> str:
    """What is wrong with the settled files."""
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
        raise CredentialError([f"{path} cannot be read: {error.strerror}"]) from None
    if mode & 0o077:
        raise CredentialError([f"{path} may be read by others (mode {mode & 0o777:03o}): chmod 600 {path}"])
    try:
        read_key(content)
    except CertificateError as error:
        raise CredentialError([f"{path}: {error}"]) from None
    return content


def spare_authority(folder: Path) -> None:
    """Raise CredentialError when an authority lies there: its files have these names, and its key is nowhere else."""
    try:
        is_there = is_authority((folder / CERTIFICATE).read_bytes())
    except OSError:
        return
    if is_there:
        raise CredentialError([f"{folder} holds an authority, whose key would be lost: name another folder"])


@contextmanager
def alone_with(folder: Path) -> Iterator[bool]:
    """Whether nobody else is replacing the credential in a folder: two at once would mix what they write.

    False: another process is; whoever asks goes on with the one that is there, which still holds.
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
    """Make a folder that nobody else may enter; one that is there stays as it is."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, and sync it: whole or not at all.

    Raises:
        OSError: the disk does not allow it.
    """
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)
