"""The read-only part of the admin port: views of runs, runs in progress, and the audit log.

It is for owners, operators and auditors.
"""

import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import grpc

from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit.files import PUBLIC_KEY, audit_folder, sizes
from atoll.protocol.paging import Paging
from atoll.protocol.threads import on_thread
from atoll.server.following.follow_process import Followers
from atoll.server.hosting.messages import NAME_MAX
from atoll.server.transport.call_limits import name_of
from atoll.server.transport.interceptor import Context
from atoll.server.views.view_process import Unseen, Viewer
from atoll.server.views.views import View

PART_BYTES = 1 << 20
NUMBER_MAX = 2**31
READINGS_MAX = 4
"""Number of readings that one caller may have open at the same time."""

FOLLOWED_MAX, FOLLOWERS_MAX = 2, 8
"""Numbers of runs that one caller, and all callers, may follow at the same time: each costs a process."""

ENTRY_MAX = 2**53


class _Places:
    """Open calls of one kind, counted by caller.

    Args:
        what: the calls, in words.
        each: the calls that one caller may have open.
        most: the calls that all callers may have open.
    """

    def __init__(self, what: str, each: int, most: float = math.inf) -> None:
        self._what, self._each, self._most = what, each, most
        self._open: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, context: Context) -> AsyncIterator[None]:
        """Count a call for the duration of the block, or refuse it."""
        name = name_of(context)
        if self._open[name] >= self._each:
            what = f"{name} has {self._each} {self._what} open already: let one of them end"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        if self._open.total() >= self._most:
            what = f"all callers together have {self._most} {self._what} open already: try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        self._open[name] += 1
        try:
            yield
        finally:
            self._open[name] -= 1
            if not self._open[name]:
                del self._open[name]


class ReadingAdmin:
    """Read-only calls of the admin port.

    Args:
        state: the state directory.
        viewer: the viewer of that directory.
        followers: the followers of that directory.
    """

    def __init__(self, state: Path, viewer: Viewer, followers: Followers) -> None:
        self._state, self._viewer, self._followers = state, viewer, followers
        self._reading = _Places("readings", READINGS_MAX)
        self._following = _Places("followed runs", FOLLOWED_MAX, FOLLOWERS_MAX)

    async def stop_reading(self) -> None:
        """End the idle process of the views."""
        await self._viewer.close()

    async def Look(self, request: pb.LookRequest, context: Context) -> AsyncIterator[pb.LookReply]:
        """Send a view as JSON, in parts."""
        if fault := _fault_of(request):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        async with self._reading.taken(context):
            try:
                view, paging = View(request.view), _paging(request)
                async with aclosing(self._viewer.look(view, request.run_id, request.number, paging)) as parts:
                    async for part in parts:
                        yield pb.LookReply(json=part)
            except LookupError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            except (Unseen, OSError) as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))

    async def Follow(self, request: pb.FollowRequest, context: Context) -> AsyncIterator[pb.FollowReply]:
        """Send a run's events as they happen, from an entry of its journal on, until the run has ended."""
        if fault := _fault_of_run(request.run_id):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        if request.after > ENTRY_MAX:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"after {request.after}; allowed: at most {ENTRY_MAX}"
            )
        after = request.after if request.HasField("after") else None
        async with self._following.taken(context):
            try:
                async with aclosing(self._followers.follow(request.run_id, after)) as parts:
                    async for part in parts:
                        yield pb.FollowReply(lines=part)
            except LookupError as error:
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
            except (Unseen, OSError) as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))

    async def ReadAuditLog(self, request: pb.ReadAuditLogRequest, context: Context) -> AsyncIterator[pb.AuditLogPart]:
        """Send the public key and the lines of the log written so far, file after file."""
        folder = audit_folder(self._state)
        async with self._reading.taken(context):
            try:
                for path, num_bytes in [(folder / PUBLIC_KEY, PART_BYTES), *await on_thread(None, sizes, folder)]:
                    async with aclosing(_blocks(path, num_bytes)) as blocks:
                        async for block in blocks:
                            yield pb.AuditLogPart(file=path.name, data=block)
            except OSError as error:
                await context.abort(grpc.StatusCode.INTERNAL, f"the log cannot be read: {error}")


def _fault_of(request: pb.LookRequest) -> str | None:
    if request.view not in list(View):
        return f"view {request.view[:NAME_MAX]!r}: allowed: {', '.join(View)}"
    if fault := _fault_of_run(request.run_id):
        return fault
    if not 0 <= request.number <= NUMBER_MAX:
        return f"number {request.number}; allowed: 0 to {NUMBER_MAX}"
    return "; ".join(_paging(request).faults(request.view)) or None


def _paging(request: pb.LookRequest) -> Paging:
    return Paging(
        count=request.count if request.HasField("count") else None,
        after=request.after,
        last=request.last,
        state=request.state,
        fate=request.fate,
        client=request.client,
        text=request.text,
        prefix=request.prefix,
        whole=request.whole,
        bare=request.bare,
    )


def _fault_of_run(run_id: str) -> str | None:
    if len(run_id) > NAME_MAX:
        return f"run_id has {count_of(len(run_id), 'character')}; allowed: at most {NAME_MAX}"
    return None


async def _blocks(path: Path, num_bytes: int) -> AsyncGenerator[bytes]:
    """Yield at most `num_bytes` of a file, in blocks."""
    with path.open("rb") as file:
        while num_bytes and (block := await on_thread(None, file.read, min(PART_BYTES, num_bytes))):
            num_bytes -= len(block)
            yield block
