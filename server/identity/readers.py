"""The readers of an HTTP listener on other interfaces than loopback: members who may read, by mutual TLS."""

import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import inspect

from atoll.protocol.identity.certificates import CertificateError, read_leaf, server_name
from atoll.protocol.identity.credential import AUTHORITIES, CERTIFICATE, KEY, Credential, CredentialError
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.names import COORDINATOR, Identity
from atoll.server.errors import StateUnusable
from atoll.server.identity.register import REVOKED, is_revoked_in
from atoll.server.identity.rules import READERS
from atoll.server.identity.setup import MINE, identity_folder
from atoll.server.journal.binding import has_state, open_database

FRESH_S = 0.25
"""Seconds after which a stored revocation is looked up again."""

LOOK_UP_S = 5.0
"""Longest wait for another look-up: while a database hangs, one thread waits for it, and all others end."""

RELOAD_S = 1.0
"""Least seconds between two looks for a renewed certificate of the listener."""


class Readers:
    """Check of a reader's certificate, and the listener's own.

    Args:
        keeper: the credential of the listener; each handshake uses the newest.
        is_revoked: returns True for a revoked certificate, by identity and serial number.
    """

    def __init__(self, keeper: Keeper, is_revoked: Callable[[Identity, int], bool]) -> None:
        self._keeper, self._is_revoked = keeper, is_revoked
        self._shown: tuple[Credential, ssl.SSLContext] | None = None

    @property
    def name(self) -> str:
        """The DNS name in the listener's certificate."""
        return server_name(self._keeper.identity)

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake."""
        credential, folder = self._keeper.current, self._keeper.folder
        if self._shown is None or self._shown[0] is not credential:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version, context.verify_mode = ssl.TLSVersion.TLSv1_2, ssl.CERT_REQUIRED
            context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
            context.load_verify_locations(folder / AUTHORITIES)
            self._shown = credential, context
        return self._shown[1]

    def refusal(self, certificate: bytes | None) -> str:
        """Return why a reader is refused, by its certificate (DER); empty: it may read."""
        try:
            leaf = read_leaf(ssl.DER_cert_to_PEM_cert(certificate or b"").encode())
        except CertificateError as error:
            return str(error)
        if leaf.identity.role not in READERS:
            return f"{leaf.identity} may not read here; allowed: {', '.join(READERS)}"
        if leaf.expires_at <= time.time():  # a connection may outlive the certificate of its handshake
            return f"the certificate of {leaf.identity} has expired"
        if self._is_revoked(leaf.identity, leaf.serial):
            return f"the certificate of {leaf.identity} is revoked"
        return ""


class StoredReaders(Readers):
    """Readers of a process beside the coordinator, by the certificate and the register of its state directory.

    Args:
        state: the state directory.

    Raises:
        CredentialError: the directory has no certificate of its coordinator, or this user may not read its key.
        StateUnusable: it is no state directory.
    """

    def __init__(self, state: Path) -> None:
        if not has_state(state):
            raise StateUnusable(f"{state} is not a state directory: there is no state.db in it")
        super().__init__(Keeper(identity_folder(state) / MINE), self._is_stored_as_revoked)
        if self._keeper.identity != COORDINATOR:
            raise CredentialError([f"{self._keeper.folder} has the certificate of {self._keeper.identity}"])
        self._state, self._lock, self._reloaded_at = state, threading.Lock(), time.monotonic()
        self._found: dict[tuple[Identity, int], tuple[float, bool]] = {}

    def context(self) -> ssl.SSLContext:
        """Return the context of the next handshake, with the certificate that the coordinator has now."""
        if time.monotonic() - self._reloaded_at > RELOAD_S:
            self._reloaded_at = time.monotonic()
            with suppress(CredentialError):  # the older one is valid still
                self._keeper.reload()
        return super().context()

    def refusal(self, certificate: bytes | None) -> str:
        """Return why a reader is refused; all are while the register cannot be read."""
        try:
            return super().refusal(certificate)
        except OSError as error:
            return f"whether a certificate is revoked cannot be read now: {error}"

    def _is_stored_as_revoked(self, identity: Identity, serial: int) -> bool:
        """Return whether the register has this certificate as revoked, at most `FRESH_S` ago."""
        if not self._lock.acquire(timeout=LOOK_UP_S):
            raise TimeoutError("the look-up of another certificate has not ended")
        try:
            at, is_revoked = self._found.get((identity, serial), (0.0, True))
            if not is_revoked and time.monotonic() - at < FRESH_S:
                return False
            begun = time.monotonic()
            with closing(open_database(self._state, read_only=True)) as database, database.transaction() as connection:
                has_register = inspect(connection).has_table(REVOKED.name)
                is_revoked = has_register and is_revoked_in(connection, identity, serial)
            self._found = {one: seen for one, seen in self._found.items() if begun - seen[0] < FRESH_S}
            self._found[identity, serial] = begun, is_revoked
            return is_revoked
        finally:
            self._lock.release()
