"""The read-only part of the admin port: the views of runs, and the audit log, for owners, operators and auditors."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc

from atoll.aggregation.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit.files import PUBLIC_KEY, audit_folder, sizes
from atoll.protocol.threads import on_thread
from atoll.server.hosting.messages import NAME_MAX
from atoll.server.transport.call_limits import name_of
from atoll.server.transport.interceptor import Context
from atoll.server.views.view_process import Unseen, Viewer
from atoll.server.views.views import View

PART_BYTES = 1 << 20
NUMBER_MAX = 2**31
READINGS_MAX = 4
"""The readings that one caller may have open at the same time."""


class ReadingAdmin:
    """The read-only calls of the admin port.

    Args:
        state: the state directory.
        viewer: the viewer of that directory.
    """

    def __init__(self, state: Path, viewer: Viewer) -> None:
        self._state, self._viewer = state, viewer
        self._reading: Counter[str] = Counter()

    async def Look(self, request: pb.LookRequest, context: Context) -> AsyncIterator[pb.LookReply]:
        """Send a view as JSON, in parts."""
        if fault := _fault_of(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        async with self._bounded(context):
            try:
                async with aclosing(self._viewer.look(View(request.view), request.run_id, request.number)) as parts:
                    async for part in parts:
                        yield pb.LookReply(json=part)
            except LookupError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            except (Unseen, OSError) as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))

    async def ReadAuditLog(self, request: pb.ReadAuditLogRequest, context: Context) -> AsyncIterator[pb.AuditLogPart]:
        """Send the public key and the lines of the log that are written by now, file after file."""
        folder = audit_folder(self._state)
        async with self._bounded(context):
            try:
                for path, num_bytes in [(folder / PUBLIC_KEY, PART_BYTES), *await on_thread(None, sizes, folder)]:
                    async with aclosing(_blocks(path, num_bytes)) as blocks:
                        async for block in blocks:
                            yield pb.AuditLogPart(file=path.name, data=block)
            except OSError as error:
                await context.abort(grpc.StatusCode.INTERNAL, f"the log cannot be read: {error}")

    @asynccontextmanager
    async def _bounded(self, context: Context) -> AsyncIterator[None]:
        """Bound the open readings of each caller: a reading keeps files open for as long as its reader likes."""
        name = name_of(context)
        if self._reading[name] >= READINGS_MAX:
            what = f"{name} has {READINGS_MAX} readings open already: let one of them end"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        self._reading[name] += 1
        try:
            yield
        finally:
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]


def _fault_of(request: pb.LookRequest) -> str | None:
    if request.view not in list(View):
        return f"view {request.view[:NAME_MAX]!r}: allowed: {', '.join(View)}"
    if len(request.run_id) > NAME_MAX:
        return f"run_id has {count_of(len(request.run_id), 'character')}; allowed: at most {NAME_MAX}"
    if not 0 <= request.number <= NUMBER_MAX:
        return f"number {request.number}; allowed: 0 to {NUMBER_MAX}"
    return None


async def _blocks(path: Path, num_bytes: int) -> AsyncGenerator[bytes]:
    """Yield at most `num_bytes` of a file, in blocks."""
    with path.open("rb") as file:
        while num_bytes and (block := await on_thread(None, file.read, min(PART_BYTES, num_bytes))):
            num_bytes -= len(block)
            yield block
