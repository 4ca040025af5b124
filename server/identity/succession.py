"""The replacement of an authority by a successor, which members trust before it signs; no member enrols again.

next/key.pem, next/certificate.pem   in the authority's directory: the next authority, with its self-signed certificate
next/cross.pem                       the certificate of its key by the present authority, for which members trust it
next/begun.json                      since when members know of it, and the longest life of their certificates

    time since it was begun     signs      members are told to trust
    0 to L                      present    both: each member learns of the next one with its renewal
    L to 2 L                    next       both: the last certificates of the present one are renewed, or expire
    from 2 L on                 next       only the next one, which replaces the present one

L is the life of a certificate: after it, every valid certificate was issued or renewed since the beginning.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from atoll.ground.durable import write_private
from atoll.ground.folders import sync_folder
from atoll.protocol.identity.certificates import (
    AUTHORITY_EARLY_S,
    AUTHORITY_LIFETIME_S,
    CertificateError,
    Issuer,
    key_to_pem,
    read_certificates,
    read_key,
    to_pem,
)
from atoll.protocol.identity.credential import (
    CERTIFICATE,
    KEY,
    CredentialError,
    make_private_folder,
)

NEXT, CROSS, BEGUN = "next", "cross.pem", "begun.json"


@dataclass(frozen=True, slots=True)
class Succession:
    """Replacement of an authority that is under way."""

    issuer: Issuer
    """The next authority."""
    cross_pem: bytes
    begun_at: float
    """Time since which members know of the next authority [s since the epoch]."""
    lifetime_s: float
    """Longest life of a certificate [s]."""

    @property
    def signs_from(self) -> float:
        """Time from which on the next authority signs [s since the epoch]."""
        return self.begun_at + self.lifetime_s

    @property
    def ends_at(self) -> float:
        """Time from which on the present authority is no longer trusted [s since the epoch]."""
        return self.begun_at + 2 * self.lifetime_s

    @classmethod
    def load(cls, folder: Path, lifetime_s: float, *, begins_at: float | None) -> Self | None:
        """Read the replacement in an authority's directory; None: there is none, or it has not begun.

        Args:
            folder: the folder of the authority.
            lifetime_s: the lifetime of the certificates that it signs now [s].
            begins_at: the time at which it begins now, if it has not begun [s since the epoch]; None: it does not
                begin. It does not begin before the time at which it was made, because a clock that is behind would make
                it end too early.

        Raises:
            CredentialError: a file is damaged.
            OSError: the beginning of the replacement cannot be recorded.
        """
        place = folder / NEXT
        if not (place / KEY).exists():
            return None
        try:
            key, cross = read_key((place / KEY).read_bytes()), (place / CROSS).read_bytes()
            issuer = Issuer(read_certificates((place / CERTIFICATE).read_bytes())[0], key)
            if not (place / BEGUN).exists():
                made_at = issuer.certificate.not_valid_before_utc.timestamp() + AUTHORITY_EARLY_S
                if begins_at is None or begins_at < int(made_at):
                    return None
                write_private(place / BEGUN, json.dumps({"at": begins_at, "lifetime": lifetime_s}).encode())
                sync_folder(place)
            begun = json.loads((place / BEGUN).read_bytes())
            now_given = lifetime_s if begins_at is not None else 0.0  # a read-only command knows only the default
            return cls(issuer, cross, float(begun["at"]), max(now_given, float(begun["lifetime"])))
        except (CertificateError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
            fault = f"{place} is not a complete authority ({error}): remove it, and `atoll authority replace` it again"
            raise CredentialError([fault]) from None


def prepare(present: Issuer, folder: Path, name: str, now: float) -> Issuer:
    """Make the next authority in the directory of the present one; it begins when a coordinator opens it.

    Raises:
        CredentialError: there is a next authority already.
        OSError: a file cannot be written.
    """
    place = folder / NEXT
    if (place / KEY).exists():
        shown = "`atoll authority show` shows its progress; the first start after its end makes room for another one"
        raise CredentialError([f"{place} holds a next authority already: {shown}"])
    issuer = Issuer.create(name, now=now, lifetime_s=AUTHORITY_LIFETIME_S, early_s=AUTHORITY_EARLY_S)
    make_private_folder(place)
    (place / BEGUN).unlink(missing_ok=True)
    write_private(place / CERTIFICATE, to_pem(issuer.certificate))
    write_private(place / CROSS, to_pem(present.vouch(issuer.certificate, now=now)))
    write_private(place / KEY, key_to_pem(issuer.key))  # written last: without it there is no next authority
    sync_folder(place)
    sync_folder(folder)
    return issuer


def settle(folder: Path) -> None:
    """Replace the present authority by the next one, and delete the present key; can be repeated if interrupted."""
    place = folder / NEXT
    write_private(folder / CERTIFICATE, (place / CERTIFICATE).read_bytes())
    write_private(folder / KEY, (place / KEY).read_bytes())
    sync_folder(folder)
    (place / KEY).unlink()  # deleted first: without it the other files are not a next authority, if this is interrupted
    sync_folder(place)
    shutil.rmtree(place)
    sync_folder(folder)
