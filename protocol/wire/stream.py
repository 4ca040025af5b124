"""A call in both directions whose end is always told, and told as the other side said it.

grpc.aio's own call has three flaws on which a refusal is lost (grpc issue 36066): a write that crosses the end of the
call puts an INTERNAL of grpc's in the place of the status that has come; from then on `read` no longer gives what came
before it; and a first message waits for ever when the call ends before its metadata were sent.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class StreamBroken(ConnectionError):
    """A call did not end as it should: cut, refused, or timed out."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(f"{code.name}: {detail}" if detail else code.name)

    @property
    def is_replaced(self) -> bool:
        """Whether a newer stream of the same client has taken this one's place."""
        return self.code is grpc.StatusCode.ABORTED and "replaced" in self.detail

    @property
    def is_revoked(self) -> bool:
        """Whether this agent, or this rank, is no member any more."""
        return self.code is grpc.StatusCode.UNAUTHENTICATED and "revoked" in self.detail


@contextmanager
def broken_streams() -> Iterator[None]:
    """Turn everything that grpc raises about a call that ended into StreamBroken."""
    try:
        yield
    except grpc.RpcError as error:  # of either kind of call: both know how they ended
        raise StreamBroken(error.code(), error.details() or "") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StreamBroken(grpc.StatusCode.CANCELLED, "the channel was closed") from None
    except grpc.aio.UsageError as error:  # the channel is closed
        raise StreamBroken(grpc.StatusCode.CANCELLED, str(error)) from None


class Status(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    detail: str


def first_status(call: Any) -> "asyncio.Future[Status]":
    """The status that the other side ends a call of many replies with; to be asked for before anything is written."""
    status: asyncio.Future[Status] = asyncio.get_running_loop().create_future()

    def note(_: Any) -> None:  # called again for each later status
        if not status.done():
            status.set_result(Status(_at_once(call.code()), _at_once(call.details()) or ""))

    call.add_done_callback(note)
    return status


def _at_once(told: "Coroutine[Any, Any, Any]") -> Any:
    """What a call tells about its end when it has ended; a task would be told later, perhaps of another end."""
    try:
        told.send(None)
    except StopIteration as answer:
        return answer.value
    told.close()
    raise RuntimeError("the call goes on")


class Stream(Generic[Request, Reply]):
    """A bidirectional call; its ends are values or StreamBroken, never grpc's own.

    Replies are iterated over rather than `read`, and the first status of the call is kept: see above.
    """

    def __init__(self, method: "grpc.aio.StreamStreamMultiCallable[Request, Reply]") -> None:
        with broken_streams():
            self._call = method()
        self._replies = aiter(self._call)
        self._is_begun, self._status = False, first_status(self._call)

    async def write(self, message: Request) -> None:
        """Hand a message to the connection. On a call that has ended nothing happens: `read` says how it ended."""
        with suppress(asyncio.InvalidStateError, StreamBroken), broken_streams():
            if self._is_begun:
                await self._call.write(message)
            else:
                await self._begin(message)

    async def _begin(self, message: Request) -> None:
        """The first message. If the call ends before its metadata were sent, grpc.aio waits for these for ever."""
        writing: asyncio.Future[Any] = asyncio.ensure_future(self._call.write(message))
        try:
            await asyncio.wait({writing, self._status}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                self._is_begun = True
                await writing
        finally:
            writing.cancel()

    async def read(self) -> Reply | None:
        """The next message; None when the other side has ended the call well. Raises StreamBroken."""
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
        """Say that nothing more will be written."""
        with suppress(asyncio.InvalidStateError, StreamBroken), broken_streams():
            await self._call.done_writing()

    def cancel(self) -> None:
        """Break the call off."""
        self._call.cancel()
