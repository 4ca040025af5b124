"""The keeper of a process's credential, in memory and in its folder; it notifies listeners of replacements."""

import time
from collections.abc import Callable
from pathlib import Path

from atoll.protocol.identity.certificates import read_certificates, validity_of
from atoll.protocol.identity.clock_hint import out_of_time
from atoll.protocol.identity.credential import Credential, CredentialError
from atoll.protocol.identity.names import Identity


class Keeper:
    """Keeper of the newest credential, which any thread may read.

    Args:
        folder: the folder of the credential.

    Raises:
        CredentialError: the credential is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._current = folder, Credential.load(folder)
        self._listeners: list[Callable[[Credential], None]] = []

    @property
    def current(self) -> Credential:
        """Newest credential of the folder."""
        return self._current

    @property
    def identity(self) -> Identity:
        """Identity that the credential proves."""
        return self._current.identity

    def check(self) -> None:
        """Check that the certificate has not expired; raises CredentialError.

        A certificate that is not valid yet passes: time will make it valid, or the clock of a just started machine will
        be set.
        """
        if self._current.is_expired(now := time.time()):
            times = validity_of(read_certificates(self._current.certificate_pem)[0])
            what = f"the certificate in {self.folder} has expired: it"
            raise CredentialError([out_of_time(what, times, now, "enrol again, with a new join code")])

    def on_replaced(self, listener: Callable[[Credential], None]) -> None:
        """Call `listener` with each newer credential, on the thread that installs it."""
        self._listeners.append(listener)

    def replace(self, credential: Credential) -> None:
        """Replace the credential with a newer one, on disk first, and notify the listeners."""
        credential.store(self.folder)
        self._current = credential
        for listener in self._listeners:
            listener(credential)

    def reload(self) -> None:
        """Read the folder again after another process has replaced the credential."""
        found = Credential.load(self.folder)
        if found != self._current:
            self._current = found
            for listener in self._listeners:
                listener(found)
