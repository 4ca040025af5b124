"""The policy file: read at the start, and again whenever it changes; what is not valid allows nothing.

A change counts when it was seen twice in a row, so that a file that is just being written is not taken for whole; until
then the policy that was valid before holds. What is missing, unreadable or not allowed is never replaced by a default.
"""

import logging
from pathlib import Path

from atoll.client.policy.config import SitePolicy, default_policy
from atoll.protocol.settings import ConfigError, load_text

logger = logging.getLogger(__name__)

BYTES_MAX = 2**20


class PolicyFile:
    """One policy file, or none.

    Args:
        path: None: the default, which never changes.

    Raises:
        ConfigError: it cannot be read, or anything in it is not allowed.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._seen = self._used = _content(path)
        self.policy: SitePolicy | None = _parsed(path, self._used)
        """None: the file is not valid any more."""

    def poll(self) -> bool:
        """Look whether the file has changed, and take it up; True when the policy is another one now."""
        seen, self._seen = self._seen, _content(self.path)
        if self._seen != seen or self._seen == self._used:
            return False
        self._used = self._seen
        before = self.policy
        try:
            self.policy = _parsed(self.path, self._used)
            logger.info("the policy %s has changed, and holds from now on", self.path)
        except ConfigError as error:
            self.policy = None
            for fault in error.faults:
                logger.error("the policy is not valid, and nothing is allowed until it is: %s", fault)
        return self.policy != before


def _content(path: Path | None) -> bytes | str:
    """The bytes of the file; a text says why there are none."""
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        return error.strerror or str(error)
    return content if len(content) <= BYTES_MAX else f"more than {BYTES_MAX} bytes"


def _parsed(path: Path | None, content: bytes | str) -> SitePolicy:
    if path is None:
        return default_policy()
    if isinstance(content, str):
        raise ConfigError([f"{path}: cannot be read: {content}"])
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return load_text(SitePolicy, text, name=str(path))
