"""The sentences of a job that the site should read: the worker sends them with its answer, the agent logs them."""

import logging
from typing import Any

from atoll.ground.printable import count_of

logger = logging.getLogger("atoll.site")
"""The logger whose lines go to the site's log: in a worker process with its answer, elsewhere directly."""


class Told(logging.Handler):
    """Log handler that keeps the sentences for the site, until `take` returns them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[tuple[int, str]] = []
        self._rows: dict[str, int] = {}
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a sentence, and the number of rows that it tells."""
        self._lines.append((record.levelno, record.getMessage()))
        self._rows |= getattr(record, "rows", {})

    def take(self) -> dict[str, Any]:
        """Return the fields of an answer, as far as they are not empty.

        `said` has [level, sentence] each, `read` the rows of each split that was read.
        """
        (lines, rows), (self._lines, self._rows) = (self._lines, self._rows), ([], {})
        return ({"said": lines} if lines else {}) | ({"read": rows} if rows else {})


def tell_rows(what: str, split: str, rows: int) -> None:
    """Log for the site that the data of a split were read, and how many rows they have."""
    logger.info("read %s: %s", what, count_of(rows, "row"), extra={"rows": {split: rows}})
