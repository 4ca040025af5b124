"""The join code: everything that an enrolment needs, in one word that can be read out over a telephone.

    atoll-AE3K...    letters A-Z and digits 2-7, in either case; blanks, line ends and hyphens are ignored

It contains the addresses to enrol at, the fingerprint of the trusted authority (SHA-256 of its certificate), and the id
of the invitation with its 128-bit secret. Its last four bytes are a CRC-32, which detects every mistake within four
neighbouring letters or digits, and all but one in 2^32 of all other mistakes.
"""

import base64
import binascii
import ipaddress
import re
import zlib
from dataclasses import dataclass, field

from atoll.ground.printable import count_of

PREFIX = "atoll-"
_VERSION = 1

ID_BYTES, SECRET_BYTES, FINGERPRINT_BYTES = 8, 16, 32
ADDRESSES_MAX = 4
ADDRESS_LETTERS_MAX = 255
TEXT_MAX = 4096
"""Largest length of a code [characters], ignored ones included."""

_HEAD_BYTES, _SUM_BYTES = 1 + ID_BYTES + SECRET_BYTES + FINGERPRINT_BYTES, 4
_IGNORED = re.compile(r"[\s-]+", re.ASCII)
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


class JoinCodeError(ValueError):
    """Error: a string is not a join code; the message never contains a part of the secret."""


@dataclass(frozen=True, slots=True)
class JoinCode:
    """Content of a join code.

    Raises:
        JoinCodeError: a part does not have the allowed form.
    """

    addresses: tuple[str, ...]
    """Addresses to enrol at, host:port; the first that answers is used."""
    fingerprint: bytes
    """SHA-256 of the authority's certificate (DER)."""
    id: bytes
    """Id of the invitation."""
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.addresses) <= ADDRESSES_MAX:
            raise JoinCodeError(
                f"{count_of(len(self.addresses), 'address', 'addresses')}; allowed: 1 to {ADDRESSES_MAX}"
            )
        for address in self.addresses:
            if not is_address(address):
                raise JoinCodeError(f"address {address[:80]!r}; allowed: host:port, with a port in 1..65535")
        lengths = len(self.fingerprint), len(self.id), len(self.secret)
        if lengths != (FINGERPRINT_BYTES, ID_BYTES, SECRET_BYTES):
            raise JoinCodeError("fingerprint, id and secret have 32, 8 and 16 bytes")

    def __str__(self) -> str:
        """Return the code as one word; possession of it suffices to enrol."""
        head = bytes([_VERSION]) + self.id + self.secret + self.fingerprint
        body = head + ",".join(self.addresses).encode("ascii")
        whole = body + zlib.crc32(body).to_bytes(_SUM_BYTES, "big")
        return PREFIX + base64.b32encode(whole).decode("ascii").rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "JoinCode":
        """Read the code in a string.

        Raises:
            JoinCodeError: the string is not a join code, has a mistake, or has another version.
        """
        if len(text) > TEXT_MAX:
            raise JoinCodeError(
                f"a string of {count_of(len(text), 'character')} is not a join code; allowed: at most {TEXT_MAX}"
            )
        body = _checked(text)
        if body[0] != _VERSION:
            raise JoinCodeError(f"a join code of version {body[0]}, and this Atoll knows {_VERSION}: update it")
        if len(body) < _HEAD_BYTES:
            raise JoinCodeError("a join code without an address")
        id, secret, fingerprint, rest = (
            body[1:][start:end]
            for start, end in (
                (0, ID_BYTES),
                (ID_BYTES, ID_BYTES + SECRET_BYTES),
                (ID_BYTES + SECRET_BYTES, _HEAD_BYTES - 1),
                (_HEAD_BYTES - 1, None),
            )
        )
        try:
            addresses = tuple(rest.decode("ascii").split(","))
        except UnicodeDecodeError:
            raise JoinCodeError("the join code has an address that is not ASCII") from None
        return cls(addresses, fingerprint, id, secret)


def is_address(text: str) -> bool:
    """Return whether a string is host:port, with a name, an IPv4 address, or an IPv6 address in brackets."""
    host, _, port = text.rpartition(":")
    if len(text) > ADDRESS_LETTERS_MAX or _PORT.fullmatch(port) is None or int(port) > 65535:
        return False
    if host.startswith("[") and host.endswith("]"):
        try:
            return ipaddress.IPv6Address(host[1:-1]).scope_id is None
        except ValueError:
            return False
    return _HOST.fullmatch(host) is not None


def _checked(text: str) -> bytes:
    """Return the bytes of a code before its checksum, after checking it."""
    plain = _IGNORED.sub("", text).upper()
    prefix = PREFIX.rstrip("-").upper()
    if not (text.isascii() and plain.startswith(prefix)):
        raise JoinCodeError(f"not a join code: a code begins with {PREFIX}, and has only letters A-Z and digits 2-7")
    coded = plain.removeprefix(prefix)
    try:
        whole = base64.b32decode(coded + "=" * (-len(coded) % 8))
    except binascii.Error:
        raise JoinCodeError("not a join code: a letter or digit is missing, or it contains 0, 1, 8 or 9") from None
    if base64.b32encode(whole).decode("ascii").rstrip("=") != coded:
        raise JoinCodeError("the join code is not complete: its end is missing")
    body, checksum = whole[:-_SUM_BYTES], whole[-_SUM_BYTES:]
    if not body or zlib.crc32(body) != int.from_bytes(checksum, "big"):
        raise JoinCodeError("the join code has a mistake: copy all of it again")
    return body
