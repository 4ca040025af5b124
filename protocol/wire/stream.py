"""The bidirectional call that always reports its end, with the status that the other side sent.

A plain grpc.aio call loses a refusal in three ways (grpc issue 36066): a write that coincides with the end of the call
replaces the received status by INTERNAL; after that `read` no longer returns the messages before the end; and the first
message waits for ever if the call ends before its metadata were sent.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class StreamBroken(ConnectionError):
    """End of a call that was cut, refused or timed out."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(f"{code.name}: {detail}" if detail else code.name)

    @property
    def is_displaced(self) -> bool:
        """Return whether another process uses this process's name."""
        is_replaced = self.code is grpc.StatusCode.ABORTED and "replaced" in self.detail
        return is_replaced or self.code is grpc.StatusCode.ALREADY_EXISTS

    @property
    def is_revoked(self) -> bool:
        """Return whether the membership of this agent or rank was revoked."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED and "revoked" in self.detail


@contextmanager
def broken_streams() -> Iterator[None]:
    """Turn every grpc error about a call that has ended into StreamBroken."""
    try:
        yield
    except grpc.RpcError as error:  # from an asyncio or a blocking call: both have a code and details
        raise StreamBroken(error.code(), error.details() or "") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StreamBroken(grpc.StatusCode.CANCELLED, "the channel was closed") from None
    except grpc.aio.UsageError as error:  # the channel is closed
        raise StreamBroken(grpc.StatusCode.CANCELLED, str(error)) from None


class Status(NamedTuple):
    """Status of an ended call."""

    code: grpc.StatusCode
    detail: str


def first_status(call: Any) -> "asyncio.Future[Status]":
    """Return the future of the status with which the other side ends a streaming call; call before the first write."""
    status: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

    def note(_: Any) -> None:  # called again for each later status
        if not status.done():
            status.set_result(Status(_at_once(call.code()), _at_once(call.details()) or ""))

    call.add_done_callback(note)
    return status


def _at_once(coroutine: "Coroutine[Any, Any, Any]") -> Any:
    """Return the result of an ended call's coroutine at once; awaited in a task, it might report a later status."""
    try:
        coroutine.send(None)
    except StopIteration as answer:
        return answer.value
    coroutine.close()
    raise RuntimeError("the call has not ended")


class Stream(Generic[Request, Reply]):
    """Bidirectional call whose end is None or StreamBroken, never an error of grpc.

    It iterates over the replies instead of calling `read`, and keeps the first status of the call (see the module).
    """

    def __init__(self, method: "grpc.aio.StreamStreamMultiCallable[Request, Reply]") -> None:
        with broken_streams():
            self._call = method()
        self._replies = aiter(self._call)
        self._is_begun, self._status = False, first_status(self._call)

    async def write(self, message: Request) -> None:
        """Hand a message to the connection; after the end of the call this does nothing, and `read` reports the end."""
        with suppress(asyncio.InvalidStateError, StreamBroken), broken_streams():
            if self._is_begun:
                await self._call.write(message)
            else:
                await self._begin(message)

    async def _begin(self, message: Request) -> None:
        """Write the first message; also return if the call ends before its metadata were sent."""
        writing: asyncio.Future[Any] = asyncio.ensure_future(self._call.write(message))
        try:
            await asyncio.wait({writing, self._status}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                self._is_begun = True
                await writing
        finally:
            writing.cancel()

    async def read(self) -> Reply | None:
        """Return the next message; None: the other side has ended the call with OK.

        Raises:
            StreamBroken: the call has ended with another status.
        """
        try:
            with broken_streams():
                return await anext(self._replies, None)
        except StreamBroken:
            if not self._status.done():
                raise
            code, detail = self._status.result()
            if code is grpc.StatusCode.OK:
                return None
            raise StreamBroken(code, detail) from None

    async def half_close(self) -> None:
        """Close the writing half of the call."""
        with suppress(asyncio.InvalidStateError, StreamBroken), broken_streams():
            await self._call.done_writing()

    def cancel(self) -> None:
        """Cancel the call."""
        self._call.cancel()
