"""Interceptors of gRPC that run around every call of a server: before its handler begins, and after it has ended."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

Around = Callable[[str, Any, Context], AbstractAsyncContextManager[None]]
"""Function of (method, request, context) that returns the context manager within which a call runs; the request is None
if it is a stream."""


class WrappingInterceptor(grpc.aio.ServerInterceptor, ABC):
    """Interceptor that wraps the handler of each method once; a subclass defines what runs around a call.

    A gRPC interceptor does not see the caller, so the handler itself is wrapped. Unknown methods are left to gRPC, and
    their names are not remembered.
    """

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Return the wrapped handler of a method; None for an unknown one, which gRPC answers with UNIMPLEMENTED."""
        method = handler_call_details.method
        if (known := self._wrapped.get(method)) is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Handler:
        kind = "_".join("stream" if is_stream else "unary" for is_stream in _streams(handler))
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        behaviour = getattr(handler, kind)
        # a handler with many replies is not always a generator: health's Watch writes to its context
        wrap = self._stream if inspect.isasyncgenfunction(behaviour) else self._unary
        wrapped: Handler = make(
            wrap(method, behaviour, handler.request_streaming),
            handler.request_deserializer,
            handler.response_serializer,
        )
        return wrapped

    @abstractmethod
    def _unary(self, method: str, behaviour: Any, is_streaming: bool) -> Callable[[Any, Context], Awaitable[Any]]:
        """Wrap a handler that is awaited; `is_streaming`: its request is a stream."""

    @abstractmethod
    def _stream(self, method: str, behaviour: Any, is_streaming: bool) -> Callable[[Any, Context], Any]:
        """Wrap a handler that yields its replies."""


class Interceptor(WrappingInterceptor):
    """Interceptor that runs all calls of a server within `around`."""

    def __init__(self, around: Around) -> None:
        super().__init__()
        self._around = around

    def _unary(self, method: str, behaviour: Any, is_streaming: bool) -> Callable[[Any, Context], Awaitable[Any]]:
        async def unary(request: Any, context: Context) -> Any:
            async with self._around(method, None if is_streaming else request, context):
                return await behaviour(request, context)

        return unary

    def _stream(self, method: str, behaviour: Any, is_streaming: bool) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            about = None if is_streaming else request
            async with self._around(method, about, context), aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    yield reply

        return stream


def _streams(handler: Any) -> tuple[bool, bool]:
    return handler.request_streaming, handler.response_streaming


def code_of(context: Context) -> grpc.StatusCode:
    """Return the status code of a call that has ended on this side."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.OK)
