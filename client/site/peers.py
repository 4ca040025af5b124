"""The peers that a site's operator has pinned or distrusts, `peers.json` in the agent's state directory.

    {"distrusted": ["west"], "pinned": {"east": "0123456789abcdef0123456789abcdef"}}

`atoll site` writes it, atomically and durably, also while the agent runs, which reads it again whenever it has changed.
A file that is damaged is never replaced by an empty one: nothing is allowed until it is repaired.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path

from atoll.ground.durable import write_atomically
from atoll.ground.file_lock import exclusively
from atoll.ground.folders import in_words
from atoll.ground.printable import count_of
from atoll.ground.strict_json import ManifestError, fields_of, items_of, read_object, refuse
from atoll.protocol.identity.names import is_name
from atoll.protocol.secure.site_key import FINGERPRINT_DIGITS
from atoll.protocol.settings import ConfigError, short
from atoll.protocol.value_type import value

FILE = "peers.json"
LOCK = "peers.lock"
NUM_MAX = 10_000
"""Largest number of pinned peers, and of distrusted ones."""

_BYTES_MAX = 4 * 2**20
_HEX = frozenset("0123456789abcdef")


class PeersFault(ConfigError):
    """Error: the file of the peers cannot be used; the text says why and names the way out."""


@value
class Peers:
    """Peers by the names of their clients.

    Attributes:
        pinned: the fingerprint of each peer whose site key is known.
        distrusted: peers with which this site joins no sum, under any setting.
    """

    pinned: Mapping[str, str] = field(default_factory=dict)
    distrusted: frozenset[str] = frozenset()

    def trusting(self, fingerprints: Mapping[str, str]) -> "Peers":
        """Return these peers with the fingerprints of some pinned.

        Raises:
            PeersFault: two names would have one fingerprint, so one site would count twice in a sum.
        """
        pinned = {**self.pinned, **fingerprints}
        if faults := list(_repeated(pinned)):
            raise PeersFault(faults)
        return Peers(pinned, self.distrusted - fingerprints.keys())

    def distrusting(self, name: str) -> "Peers":
        """Return these peers without the pin of one, which is distrusted from now on."""
        return Peers({other: of for other, of in self.pinned.items() if other != name}, self.distrusted | {name})

    def encode(self) -> bytes:
        """Return the content of the file."""
        document = {"distrusted": sorted(self.distrusted), "pinned": dict(self.pinned)}
        return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def parse_peers(content: bytes) -> Peers:
    """Read the content of the file.

    Raises:
        ManifestError: it has another form; the text has the path of the value.
    """
    document = read_object(content, num_bytes_max=_BYTES_MAX, what="peers")
    found = fields_of(document, "peers", keys=frozenset({"pinned", "distrusted"}))
    pinned, distrusted = found["pinned"], items_of(found["distrusted"], "distrusted", num_max=NUM_MAX)
    if type(pinned) is not dict or len(pinned) > NUM_MAX:
        refuse("pinned", pinned, f"an object of at most {NUM_MAX} names")
    for name, digits in pinned.items():
        if not is_name(name):
            refuse("pinned", name, "names of clients")
        if type(digits) is not str or len(digits) != FINGERPRINT_DIGITS or not _HEX.issuperset(digits):
            refuse(f"pinned.{name}", digits, f"{FINGERPRINT_DIGITS} lower-case hexadecimal digits")
    for name in distrusted:
        if type(name) is not str or not is_name(name) or name in pinned:
            refuse("distrusted", name, "names of clients that are not pinned")
    for fault in _repeated(pinned):
        raise ManifestError(f"pinned: {fault}")
    return Peers(pinned, frozenset(distrusted))


def _repeated(pinned: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each fingerprint of two names."""
    owners: dict[str, str] = {}
    for name, digits in sorted(pinned.items()):
        if (other := owners.setdefault(digits, name)) != name:
            yield f"{other} and {name} have one fingerprint; allowed: one name for each: distrust one of them first"


def fingerprint_of(text: str) -> str:
    """Return the digits of a fingerprint as a person has written it, with or without spaces, in either case.

    Raises:
        ValueError: it is none; the text says what is allowed.
    """
    digits = "".join(text.split()).lower()
    if len(digits) != FINGERPRINT_DIGITS or not _HEX.issuperset(digits):
        raise ValueError(
            f"fingerprint {short(text)}: has {count_of(len(digits), 'character')} besides spaces; allowed: "
            f"{FINGERPRINT_DIGITS} hexadecimal digits, as `atoll site fingerprint` prints them"
        )
    return digits


class PeersFile:
    """The file, read again whenever it has changed.

    Args:
        folder: the agent's state directory.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = folder / LOCK
        self._seen: tuple[int, ...] | None = ()
        self._peers = Peers()
        self._fault: PeersFault | None = None

    def read(self) -> Peers:
        """Return the peers; a missing file has none.

        Raises:
            PeersFault: the file cannot be read, or is damaged.
        """
        seen = self._state()
        if seen != self._seen or self._fault is not None:
            self._peers, self._fault = Peers(), None
            try:
                self._peers = self._parsed()
            except PeersFault as fault:
                self._fault = fault
            self._seen = seen
        if self._fault is not None:
            raise self._fault
        return self._peers

    @property
    def fault(self) -> str:
        """Return a sentence about a damaged file; empty: it can be used."""
        try:
            self.read()
        except PeersFault as fault:
            return str(fault)
        return ""

    @contextmanager
    def changing(self) -> Iterator["Change"]:
        """Hold the file's lock in the block, and store the peers that the block leaves in `Change.peers`.

        Raises:
            PeersFault: the file is damaged.
            OSError: it cannot be written.
        """
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with exclusively(lock):
                change = Change(before := self.read())
                yield change
                if change.peers != before:
                    write_atomically(self.path, change.peers.encode())
        finally:
            os.close(lock)

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _parsed(self) -> Peers:
        try:
            with self.path.open("rb") as file:
                content = file.read(_BYTES_MAX + 1)
        except FileNotFoundError:
            return Peers()
        except OSError as error:
            raise PeersFault([f"{in_words(error)}: nothing is allowed until it can be read"]) from None
        try:
            return parse_peers(content)
        except ManifestError as error:
            way_out = "repair it, or remove it and trust each peer again with `atoll site trust`"
            raise PeersFault([f"{self.path}: {error}: nothing is allowed until then: {way_out}"]) from None


class Change:
    """A change of the file: `peers` as they are, to be replaced."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
