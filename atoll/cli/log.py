"""The log of a process, for the person who watches it: one line for each thing that happens, on standard error."""

import logging
import os


class _ForAPerson(logging.Formatter):
    """Time and message; what the operator may want to act on says so first."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows below when there is one."""
        line = super().format(record)
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{line}"


def configure() -> None:
    """Send everything of ours, and the warnings of others, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_ForAPerson("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("atoll").setLevel(logging.INFO)


def quiet_grpc() -> None:
    """Keep gRPC's core from writing lines of its own: strangers could fill the disk with calls that a server refuses,
    and who dials writes one for each handshake that fails, besides what we say of it.

    It reads the variable GRPC_VERBOSITY when it is first imported; one that is set stays.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
