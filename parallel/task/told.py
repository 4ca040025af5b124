"""The sentences of a job that the site should read: the worker says them with its answer, the agent logs them."""

import logging

logger = logging.getLogger("atoll.site")
"""Says a sentence to the site, in a worker process; elsewhere to the log."""


class Told(logging.Handler):
    """The sentences that are said from now on, until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[int, str]] = []
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a sentence."""
        self._lines.append((record.levelno, record.getMessage()))

    def take(self) -> dict[str, list[tuple[int, str]]]:
        """Return the field of an answer, `said`: [level, sentence] each; nothing without any."""
        lines, self._lines = self._lines, []
        return {"said": lines} if lines else {}
