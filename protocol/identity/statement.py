r"""The signed statement of each message that the coordinator pushes to a client, and its verification.

A statement is the whole content of a `ServerMessage`, for one client and one instant, as canonical bytes. So no content
can be changed on the way, sent to another client, or replayed as new. It omits only bytes that a digest in the
statement commits to. Fields added by a later Atoll are signed without a change here, and a client that does not know a
field refuses the message.

    b"atoll.v1 statement\n" + {"client":"north","issued_us":1767225600000000,"message":{"invite":{...}}}

The second part is JSON with sorted keys and no spaces, ASCII. A field with its default value is omitted, a float is the
16 hexadecimal digits of its IEEE 754 bytes (big-endian), bytes are hexadecimal.

The key is Ed25519 (RFC 8032); the coordinator's certificate certifies it in every Welcome. So a new key or certificate
only needs a new connection.
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
from atoll.protocol.identity.clock_hint import SKEW_S, instant
from atoll.protocol.identity.names import Role

LEFT_OUT = frozenset({"ServerMessage.signature", "Invite.manifest", "Invite.data", "Evaluate.manifest"})
"""Fields without a signature: `model_digest` is the SHA-256 of the manifest, which contains the digests of all
pieces."""

KEY_BYTES = 32
SIGNATURE_BYTES_MAX = 128

_STATEMENT, _PUBLISHER = b"atoll.v1 statement\n", b"atoll.v1 publisher\n"


class NotTrusted(ValueError):
    """Error: a signature or a certificate does not prove what it must; the text says which and why."""


def statement(message: pb.ServerMessage, client: str, issued_us: int) -> bytes:
    """Return the bytes to sign for a message to one client at one instant [us since the epoch]."""
    return _STATEMENT + _canonical({"client": client, "issued_us": issued_us, "message": _plain(message)})


def check_signature(message: pb.ServerMessage, client: str, key: Ed25519PublicKey) -> None:
    """Check that the owner of the key has signed this message for this client.

    Raises:
        NotTrusted: the owner has not signed the message, or it was changed.
    """
    if not message.HasField("signature"):
        raise NotTrusted("it is not signed")
    try:
        key.verify(message.signature.ed25519, statement(message, client, message.signature.issued_us))
    except InvalidSignature:
        fault = "its signature does not match this coordinator's publisher key, this client and this content"
        raise NotTrusted(fault) from None


def publisher_statement(publisher: pb.Publisher) -> bytes:
    """Return the bytes that certify a publisher key, for signing with the key of the coordinator's certificate."""
    fields = {"key": publisher.key.hex(), "issued_us": publisher.issued_us, "expires_us": publisher.expires_us}
    return _PUBLISHER + _canonical(fields)


def check_publisher(publisher: pb.Publisher, ca_pem: bytes, now: float) -> Ed25519PublicKey:
    """Check that a coordinator of this federation certifies a publisher key, and return the key.

    Args:
        publisher: the field `publisher` of a Welcome.
        ca_pem: certificates of the authorities that this client trusts.
        now: seconds since the epoch.

    Raises:
        NotTrusted: the certificate does not belong to a coordinator, comes from another authority or is not valid now,
            or the signature is not by its key.
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
            f"{what} is not valid now: it is from {instant(begin)} to {instant(end)}, and this machine's clock shows "
            f"{instant(now)}: compare the clocks of the two machines (NTP)"
        )


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _plain(message: Message) -> dict[str, Any]:
    """Return the fields that are set, except those in LEFT_OUT."""
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
