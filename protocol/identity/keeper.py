"""Keeps one's own credential, in memory and in its folder, and tells who needs to know when it is replaced."""

import time
from collections.abc import Callable
from pathlib import Path

from atoll.protocol.identity.credential import Credential, CredentialError
from atoll.protocol.identity.names import Identity


class Keeper:
    """One credential, the newest. May be read on any thread.

    Args:
        folder: where it lies.

    Raises:
        CredentialError: there is none, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._current = folder, Credential.load(folder)
        self._listeners: list[Callable[[Credential], None]] = []

    @property
    def current(self) -> Credential:
        """What to prove oneself with now."""
        return self._current

    @property
    def identity(self) -> Identity:
        """Who one is."""
        return self._current.identity

    def check(self) -> None:
        """Raise CredentialError when its time is over: nobody will believe it."""
        if self._current.is_expired(time.time()):
            until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._current.leaf.expires_at))
            raise CredentialError([f"the certificate in {self.folder} has expired on {until}: enrol anew"])

    def on_replaced(self, listener: Callable[[Credential], None]) -> None:
        """Call this with each newer credential, on the thread that brings it."""
        self._listeners.append(listener)

    def replace(self, credential: Credential) -> None:
        """Put a newer one in its place: on disk first."""
        credential.store(self.folder)
        self._current = credential
        for listener in self._listeners:
            listener(credential)

    def reload(self) -> None:
        """Read the folder again: another process has replaced what is in it."""
        found = Credential.load(self.folder)
        if found != self._current:
            self._current = found
            for listener in self._listeners:
                listener(found)
