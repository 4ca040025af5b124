"""Every admin call with its caller and outcome, and every call that was refused, into the audit log.

It stands before all other interceptors, so that it sees what those refuse.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog, Caller, acting
from atoll.server.identity.peer import peer_of

Context = grpc.aio.ServicerContext[Any, Any]

ADMIN = "/atoll.v1.Admin/"

REFUSALS = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""What is said to somebody who asks for what he must not have; the others happen to honest clients, too."""


class CallAudit(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all methods; nothing is changed but who is `acting`."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The method's handler, wrapped."""
        method: str = handler_call_details.method
        if (known := self._wrapped.get(method)) is not None:
            return known
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # UNIMPLEMENTED: any name may come, and none is remembered
        wrapped: grpc.RpcMethodHandler[Any, Any] = self._wrap(method, handler)
        self._wrapped[method] = wrapped
        return wrapped

    def _wrap(self, method: str, handler: Any) -> Any:
        codecs = {"request_deserializer": handler.request_deserializer}
        codecs["response_serializer"] = handler.response_serializer
        if handler.response_streaming:
            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(self._stream(method, handler.stream_stream), **codecs)
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler.unary_stream), **codecs)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(method, handler.stream_unary), **codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), **codecs)

    def _unary(self, method: str, behaviour: Any) -> Callable[[Any, Context], Awaitable[Any]]:
        async def unary(request: Any, context: Context) -> Any:
            caller = caller_of(context)
            try:
                with acting(caller):
                    return await behaviour(request, context)
            finally:
                self._said(method, _object_of(request), context, caller)

        return unary

    def _stream(self, method: str, behaviour: Any) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with aclosing(behaviour(request, context)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                self._said(method, "", context, None)

        return stream

    def _said(self, method: str, about: str, context: Context, caller: Caller | None) -> None:
        code, object_ = _code_of(context), f"{method} {about}".rstrip()
        outcome = code.name if code is grpc.StatusCode.OK else f"{code.name}: {context.details() or ''}"
        if method.startswith(ADMIN):
            self._audit.say(Action.CALL, object_, outcome, caller=caller or caller_of(context))
        elif code in REFUSALS:
            self._audit.say_seldom(Action.CALL_REFUSE, method, outcome, caller=caller or caller_of(context))


def caller_of(context: Context) -> Caller:
    """Who is calling: the name in the certificate, or else the address without its port."""
    peer = peer_of(context)
    if peer is not None:
        return Caller(peer.identity.name, peer.identity.role)
    return Caller(context.peer().rpartition(":")[0], "anonymous")


def _code_of(context: Context) -> grpc.StatusCode:
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.OK)


def _object_of(request: Any) -> str:
    """The run that a request is about; nothing else of a request is said."""
    return str(getattr(request, "run_id", ""))
