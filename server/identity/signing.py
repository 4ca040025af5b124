"""The publisher: it signs every message that the coordinator pushes to a client, as the last step before sending.

    STATE/identity/publisher.pem    its Ed25519 key, made at the first start, readable by its owner only

To rotate the key, move the file away and start the coordinator: clients learn the new one in their next Welcome.
"""

from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.ground.durable import write_private
from atoll.ground.folders import sync_folder
from atoll.ground.private_key import private_key_in
from atoll.ground.text_files import NotText, text_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.credential import Credential, make_private_folder
from atoll.protocol.identity.statement import publisher_statement, statement
from atoll.server.clock import next_instant
from atoll.server.errors import StoreCorrupted

KEY = "publisher.pem"


class Signer:
    """Signer of messages with the true time, each later than its predecessor, even across a restart.

    Args:
        key: the publisher's key.
        credential: returns the coordinator's credential; called for each Welcome, so that a renewed one is used at
            once.
        clock: the true clock [s since the epoch], which may be set.
        not_before: the last instant at which an earlier process may have signed [s since the epoch].
    """

    def __init__(
        self,
        key: Ed25519PrivateKey,
        credential: Callable[[], Credential],
        clock: Callable[[], float],
        *,
        not_before: float = 0.0,
    ) -> None:
        self._key, self._credential, self._clock = key, credential, clock
        self._last_us = _micros(not_before)
        self._certified: tuple[bytes, pb.Publisher] | None = None

    def sign(self, message: pb.ServerMessage, client: str) -> pb.ServerMessage:
        """Sign a message for this client in place and return it; a Welcome also gets the publisher's key."""
        if message.HasField("welcome"):
            message.welcome.publisher.CopyFrom(self._publisher())
        issued_us = self._last_us = next_instant(self._last_us, _micros(self._clock()))
        message.signature.Clear()
        signed = self._key.sign(statement(message, client, issued_us))
        message.signature.issued_us, message.signature.ed25519 = issued_us, signed
        return message

    @property
    def last(self) -> float:
        """The newest signed instant [s since the epoch]."""
        return self._last_us / 1e6

    def _publisher(self) -> pb.Publisher:
        credential, now = self._credential(), self._clock()
        certified = self._certified
        if certified is None or certified[0] != credential.certificate_pem or certified[1].issued_us > _micros(now):
            certified = self._certified = credential.certificate_pem, certify(self._key, credential, now)
        return certified[1]


def certify(key: Ed25519PrivateKey, credential: Credential, now: float) -> pb.Publisher:
    """Return the proof that the key is the publisher key of the coordinator with this credential."""
    publisher = pb.Publisher(
        key=key.public_key().public_bytes_raw(),
        issued_us=_micros(now),
        expires_us=_micros(credential.leaf.expires_at),
        certificate=credential.certificate_pem,
    )
    publisher.signature = credential.key.sign(publisher_statement(publisher), ec.ECDSA(hashes.SHA256()))
    return publisher


def publisher_key(folder: Path) -> Ed25519PrivateKey:
    """Load the key in a folder, or make a missing one.

    Raises:
        StoreCorrupted: the key is damaged, of another kind, or readable by others.
    """
    path = folder / KEY
    if not path.exists():
        _make(path)
    if path.stat().st_mode & 0o077:
        raise StoreCorrupted(f"{path}: a private key that others may read; allowed: mode 0600")
    try:
        key = private_key_in(text_of(path.read_bytes(), path).encode())
    except NotText as error:
        raise StoreCorrupted(str(error)) from error
    except ValueError as error:
        raise StoreCorrupted(f"{path}: no private key in PEM; move it away, and a new one is made") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreCorrupted(f"{path}: a private key of another kind; allowed: Ed25519")
    return key


def _make(path: Path) -> None:
    make_private_folder(path.parent)
    private = serialization.PrivateFormat.PKCS8
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    sync_folder(path.parent)


def _micros(seconds: float) -> int:
    return int(seconds * 1e6)
