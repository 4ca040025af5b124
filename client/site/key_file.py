"""The file of a site's long-lived key, `identity/site.pem`: Ed25519, PKCS 8 in PEM, mode 0600.

It is made once, from the operating system's randomness. A file that is damaged, or that others may read, is never
replaced: peers have pinned its key, and this site's promises belong to it.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.policy.database import SITE_KEY
from atoll.ground.durable import write_private
from atoll.ground.folders import in_words, sync_folder
from atoll.ground.private_key import private_key_in
from atoll.protocol.settings import ConfigError

FILE = SITE_KEY.name
_BYTES_MAX = 4096

_WAY_OUT = (
    "put it back from a copy, or make a new key with `atoll site accept-rollback --new-key`, which peers pin again"
)


class KeyFault(ConfigError):
    """Error: the file has no usable key; the text says why and names the way out."""


def read_site_key(folder: Path) -> Ed25519PrivateKey | None:
    """Return the key in an identity folder; None: there is no file.

    Raises:
        KeyFault: it cannot be read, is damaged, or may be read by others.
    """
    path = folder / FILE
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFault([f"{in_words(error)}: nothing is allowed until it can be read"]) from None
    if mode & 0o077:
        raise KeyFault([f"{path} may be read by others (mode {mode & 0o777:03o}); allowed: 600: chmod 600 {path}"])
    return parse_site_key(content, path)


def parse_site_key(content: bytes, path: object) -> Ed25519PrivateKey:
    """Return the key in the content of a file.

    Raises:
        KeyFault: it is none; the text names the file and never has a part of the content.
    """
    if len(content) > _BYTES_MAX:
        raise KeyFault([f"{path} has more than {_BYTES_MAX} bytes and is no key; allowed: Ed25519 in PEM: {_WAY_OUT}"])
    try:
        key = private_key_in(content)
    except ValueError:
        raise KeyFault([f"{path} is damaged; allowed: an Ed25519 key in PEM, no passphrase: {_WAY_OUT}"]) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise KeyFault([f"{path} has a key of another kind; allowed: Ed25519: {_WAY_OUT}"])
    return key


def make_site_key(folder: Path) -> Ed25519PrivateKey:
    """Make a new key and store it, durable on return, in place of an old one.

    Raises:
        OSError: the file cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(folder / FILE, content)
    sync_folder(folder)
    return key


def raw_public(key: Ed25519PrivateKey) -> bytes:
    """Return the raw public key."""
    return key.public_key().public_bytes_raw()
