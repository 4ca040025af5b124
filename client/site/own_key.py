"""A site's key from outside of its agent: its fingerprint for a person, and a new key after a rollback."""

from contextlib import closing
from pathlib import Path

from atoll.client.disk.state_directory import StateDirectory
from atoll.client.policy.database import PolicyDatabase
from atoll.client.policy.promise_store import PromiseStore
from atoll.client.site.key_file import FILE, KeyFault, make_site_key, raw_public, read_site_key
from atoll.protocol.identity.certificates import CertificateError, read_leaf
from atoll.protocol.identity.credential import CERTIFICATE, make_private_folder
from atoll.protocol.secure.site_key import fingerprint
from atoll.protocol.settings import ConfigError


def fingerprint_in(folder: Path) -> str:
    """Return the fingerprint of the site key in an agent's state directory, 32 hexadecimal digits.

    Raises:
        ConfigError: there is none yet, or its file cannot be used.
    """
    if (key := read_site_key(folder / "identity")) is None:
        raise KeyFault(
            [f"{folder} has no identity/{FILE} yet: start its agent once, with a join code; an --insecure one has none"]
        )
    return fingerprint(raw_public(key))


def name_in(folder: Path) -> str:
    """Return the name of the client whose certificate is in an agent's state directory.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    path = folder / "identity" / CERTIFICATE
    try:
        return read_leaf(path.read_bytes()).identity.name
    except (OSError, CertificateError) as error:
        raise ConfigError([f"{path} names no client ({error}): enrol the agent first, with a join code"]) from None


def replace_site_key(folder: Path) -> tuple[str, str]:
    """Give a site a new key, under which its promises continue; return the old and the new fingerprint.

    The old one is empty if its file cannot be read. Promises that can be read still bind.

    Raises:
        ConfigError: the agent runs.
    """
    with closing(StateDirectory(folder)) as directory:
        try:
            old = fingerprint_in(folder)
        except KeyFault:
            old = ""
        make_private_folder(directory.identity)
        with closing(PolicyDatabase(folder, may_begin=True)) as database:
            store = PromiseStore(database)
            key = make_site_key(directory.identity)
            store.begin(raw_public(key))
        return old, fingerprint(raw_public(key))
