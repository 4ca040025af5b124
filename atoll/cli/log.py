"""The log of a process, for the person at the terminal: one line for each event, on standard error."""

import logging
import os


class _Lines(logging.Formatter):
    """Lines of a time, the name of the process if it has one, a level from `warning` upward, and the message."""

    def __init__(self, source: str) -> None:
        super().__init__("%(message)s")
        self._source = f"{source}: " if source else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; the traceback of an exception follows on lines of its own."""
        line = super().format(record)
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {self._source}{level}{line}"


def configure(source: str = "") -> None:
    """Send Atoll's records from `info` upward, and the warnings of other libraries, to standard error.

    Several agents may share one terminal: each passes its site's name as `source`, which follows the time in every
    line.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(source))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("atoll").setLevel(logging.INFO)


def quiet_grpc() -> None:
    """Keep gRPC's core from writing lines of its own to standard error.

    It writes one for each call that a server refuses, so that strangers could fill the disk, and one for each handshake
    that fails, which Atoll's log has already. gRPC reads the variable GRPC_VERBOSITY when it is first imported; a value
    that is set stays.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
