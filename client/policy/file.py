"""The policy file, read at the start and again after each change; a file that is not valid allows nothing.

A change takes effect when two reads in a row return the same content, so that a half-written file is never used; until
then the previous policy holds. A file that is missing, unreadable or not valid is never replaced by a default.
"""

import logging
from pathlib import Path

from atoll.client.policy.config import SitePolicy, default_policy
from atoll.ground.folders import in_words
from atoll.ground.text_files import NotText, text_of
from atoll.protocol.settings import ConfigError, load_text

logger = logging.getLogger(__name__)

BYTES_MAX = 2**20


class PolicyFile:
    """Policy from a file, or the default policy.

    Args:
        path: the path of the file; None: the default policy, which never changes.

    Raises:
        ConfigError: the file cannot be read, or anything in it is not allowed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._seen = self._used = _content(path)
        self.policy: SitePolicy | None = _parsed(path, self._used)
        """Current policy; None while the file is not valid."""

    def poll(self) -> bool:
        """Read the file again, and return whether the policy has changed."""
        seen, self._seen = self._seen, _content(self.path)
        if self._seen != seen or self._seen == self._used:
            return False
        self._used = self._seen
        before = self.policy
        try:
            self.policy = _parsed(self.path, self._used)
            logger.info("the policy %s has changed and is in force from now on", self.path)
        except ConfigError as error:
            self.policy = None
            for fault in error.faults:
                logger.error("the policy is not valid; nothing is allowed until it is: %s", fault)
        return self.policy != before


def _content(path: Path | None) -> bytes | str:
    """Return the bytes of the file, or a sentence that says why it cannot be read."""
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        return in_words(error)
    return content if len(content) <= BYTES_MAX else f"{path} has more than {BYTES_MAX} bytes"


def _parsed(path: Path | None, content: bytes | str) -> SitePolicy:
    if path is None:
        return default_policy()
    if isinstance(content, str):
        raise ConfigError([content])
    try:
        text = text_of(content, path)
    except NotText as error:
        raise ConfigError([str(error)]) from error
    return load_text(SitePolicy, text, name=str(path))
