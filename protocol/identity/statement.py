"""What the coordinator signs of all that it pushes to a client, and how a client checks it.

A statement is everything that a `ServerMessage` says, for one client and at one instant, as canonical bytes: so nothing
that changes what a client does can be changed on the way, put before another client, or shown twice as if it were new.
Left out are only the bytes that a digest in the statement commits to. A field that a later Atoll adds is signed without
a line here, and a client that does not know it refuses the message rather than do something else.

    b"atoll.v1 statement\\n" + {"client":"north","issued_us":1767225600000000,"message":{"invite":{...}}}

is JSON with sorted keys and no spaces, ASCII. A field with its default value is left out, a float is the 16 hexadecimal
digits of its IEEE 754 bytes (big-endian), bytes are hexadecimal.

The key is Ed25519 (RFC 8032), and certified by the coordinator's certificate in every Welcome: a new key, and a new
certificate, need nothing but a new connection.
"""

import json
import struct
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.certificates import CertificateError, certified_key, check_issued, read_leaf
from atoll.protocol.identity.names import Role

LEFT_OUT = frozenset({"ServerMessage.signature", "Invite.manifest", "Invite.data", "Evaluate.manifest"})
"""`model_digest` is the SHA-256 of the manifest, and the manifest has those of all pieces."""

KEY_BYTES = 32
SIGNATURE_BYTES_MAX = 128
SKEW_S = 300.0
"""By how much two clocks may differ."""

_STATEMENT, _PUBLISHER = b"atoll.v1 statement\n", b"atoll.v1 publisher\n"


class NotTrusted(ValueError):
    """A signature or a certificate does not prove what it should; the text says which and why."""


def statement(message: pb.ServerMessage, client: str, issued_us: int) -> bytes:
    """The bytes that are signed of a message to a client."""
    return _STATEMENT + _canonical({"client": client, "issued_us": issued_us, "message": _plain(message)})


def check_signature(message: pb.ServerMessage, client: str, key: Ed25519PublicKey) -> None:
    """Check that the owner of the key has signed this message for this client.

    Raises:
        NotTrusted: it has not, or something was changed since.
    """
    if not message.HasField("signature"):
        raise NotTrusted("it is not signed")
    try:
        key.verify(message.signature.ed25519, statement(message, client, message.signature.issued_us))
    except InvalidSignature:
        what = "its signature is not that of this coordinator's publisher key for this client and these words"
        raise NotTrusted(what) from None


def publisher_statement(publisher: pb.Publisher) -> bytes:
    """The bytes that the coordinator's certificate's key signs of its publisher key."""
    fields = {"key": publisher.key.hex(), "issued_us": publisher.issued_us, "expires_us": publisher.expires_us}
    return _PUBLISHER + _canonical(fields)


def check_publisher(publisher: pb.Publisher, ca_pem: bytes, now: float) -> Ed25519PublicKey:
    """The publisher key, when a coordinator of this federation says that it is its own.

    Args:
        publisher: from a Welcome.
        ca_pem: the authorities that this client trusts.
        now: seconds since the epoch.

    Raises:
        NotTrusted: the certificate is no coordinator's, of another authority, or out of its time; or the signature is
            not its key's.
    """
    try:
        leaf = read_leaf(publisher.certificate)
        key = certified_key(publisher.certificate)
        check_issued(publisher.certificate, ca_pem, key)
    except CertificateError as error:
        raise NotTrusted(f"the publisher key's certificate: {error}") from None
    if leaf.identity.role is not Role.COORDINATOR:
        raise NotTrusted(f"the publisher key is certified by {leaf.identity}; allowed: a coordinator")
    _check_time("the coordinator's certificate", leaf.issued_at, leaf.expires_at, now)
    _check_time("the publisher key", publisher.issued_us / 1e6, publisher.expires_us / 1e6, now)
    if len(publisher.key) != KEY_BYTES or len(publisher.signature) > SIGNATURE_BYTES_MAX:
        raise NotTrusted(f"a publisher key has {KEY_BYTES} bytes, its signature at most {SIGNATURE_BYTES_MAX}")
    try:
        key.verify(publisher.signature, publisher_statement(publisher), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise NotTrusted("the publisher key is not signed by the key of the coordinator's certificate") from None
    return Ed25519PublicKey.from_public_bytes(publisher.key)


def _check_time(what: str, begin: float, end: float, now: float) -> None:
    if not begin - SKEW_S <= now <= end:
        raise NotTrusted(
            f"{what} is not valid now: it is from {begin:.0f} to {end:.0f}, and this clock shows {now:.0f}"
        )


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _plain(message: Message) -> dict[str, Any]:
    """The fields that are set, but for those that are left out."""
    kind = message.DESCRIPTOR.name
    return {
        field.name: [_value(field, item) for item in value] if field.is_repeated else _value(field, value)
        for field, value in message.ListFields()
        if f"{kind}.{field.name}" not in LEFT_OUT
    }


def _value(field: FieldDescriptor, value: Any) -> Any:
    match value:
        case Message():
            return _plain(value)
        case bytes():
            return value.hex()
        case float():
            return struct.pack(">d", value).hex()
        case bool() | int() | str():
            return value
    raise TypeError(f"{field.full_name}: no canonical form of a {type(value).__name__}")
