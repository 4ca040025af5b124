"""An export that kills its process: `python -m tests.cli.exports.killed_export SECONDS COMMAND...`."""

import os
import signal
import sys
import threading

from atoll.cli.main import run
from atoll.exports import exporter


def main() -> None:
    """Run the command."""
    seconds, export = float(sys.argv.pop(1)), exporter.export

    def killed(source, destination):  # type: ignore[no-untyped-def]
        threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()
        return export(source, destination)

    exporter.ROWS_AT_ONCE = 1  # so that the kill falls among many writes
    exporter.export = killed
    sys.argv[0] = "atoll"
    run()


if __name__ == "__main__":
    main()
