"""The following of a run in a separate process, for callers on other machines: a replay may take seconds and gigabytes.

The process reads the journal from disk, as the commands on this machine do, and writes a line of JSON for each item to
a pipe. It waits while its reader does not read: so a slow caller costs the coordinator only one chunk of memory.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from atoll.protocol.json_values import plain
from atoll.server.following.items import Item, document_of
from atoll.server.following.reader import follow
from atoll.server.views.history import History
from atoll.server.views.view_process import environment, fault_of, reading_for_the_coordinator
from atoll.server.views.views import run_of

PART_BYTES = 256 * 1024
COMMAND = (sys.executable, "-P", "-c", "from atoll.server.following.follow_process import main; main()")


class Followers:
    """Followers of one state directory.

    Args:
        state: the directory.
        database: the URL of its database; empty: the URL that the directory names.
    """

    def __init__(self, state: Path, database: str = "") -> None:
        self._state, self._database = state, database

    async def follow(self, run: str, after: int | None) -> AsyncGenerator[bytes]:
        """Yield the items of a run as lines of JSON, in chunks of arbitrary boundaries, until the run has ended.

        Args:
            run: id or name of the run; empty: the newest run.
            after: the entry after which the items begin; None: the newest snapshot.

        Raises:
            LookupError: there is no such run, or it has been deleted.
            Unseen: the state directory cannot be read.
        """
        order = {"state": str(self._state), "database": self._database, "run": run, "after": after}
        with TemporaryFile(dir=self._state) as told:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, env=environment()
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(order).encode() + b"\n")  # not in its arguments, like for a view
                while part := await process.stdout.read(PART_BYTES):
                    yield part
                if code := await process.wait():
                    raise fault_of(code, told)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                process.stdin.close()
                while await process.stdout.read(PART_BYTES):  # the rest in the pipe, so that asyncio closes it
                    pass
                await process.wait()


def line_of(item: Item) -> bytes:
    """Return an item as a line of JSON."""
    return json.dumps(plain(document_of(item)), ensure_ascii=False).encode() + b"\n"


def main() -> None:
    """Run the process: read an order from standard input and write the items to standard output as they arrive."""
    with reading_for_the_coordinator() as order:
        history = History(Path(order["state"]), order["database"])
        for item in follow(history, run_of(history, order["run"]), order["after"]):
            sys.stdout.buffer.write(line_of(item))
            sys.stdout.buffer.flush()
