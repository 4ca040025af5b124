"""Every admin call with its caller and outcome, and every call that was refused, into the audit log.

An admin call that came to nothing costs its caller nothing: as refused ones it is soon only counted, so that nobody who
may do nothing fills the log. It stands before all other interceptors, so that it sees what those refuse.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from atoll.server.audit.actions import Action
from atoll.server.audit.log import AuditLog, Caller, acting
from atoll.server.transport.interceptor import Context, Interceptor, code_of
from atoll.server.transport.peer import peer_of

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


class CallAudit(Interceptor):
    """Nothing is changed but who is `acting`."""

    def __init__(self, audit: AuditLog) -> None:
        super().__init__(self._audited)
        self._audit = audit

    @asynccontextmanager
    async def _audited(self, method: str, request: Any, context: Context) -> AsyncIterator[None]:
        caller, has_ended = caller_of(context), False
        try:
            if method.startswith(ADMIN):
                with acting(caller):
                    yield
            else:
                yield
            has_ended = True
        finally:
            code = code_of(context)
            if code is grpc.StatusCode.OK and not has_ended:  # what was broken off has no code of its own
                code = grpc.StatusCode.CANCELLED
            self._said(method, _object_of(request), context, caller, code)

    def _said(self, method: str, about: str, context: Context, caller: Caller, code: grpc.StatusCode) -> None:
        outcome = code.name if code is grpc.StatusCode.OK else f"{code.name}: {context.details() or ''}"
        if method.startswith(ADMIN):
            object_ = f"{method} {about}".rstrip()
            if code is grpc.StatusCode.OK:
                self._audit.say(Action.CALL, object_, outcome, caller=caller)
            else:  # whatever run it names: of these a caller has as many as it likes
                self._audit.say_seldom(Action.CALL, object_, outcome, caller=caller, counted_as=method)
        elif code in REFUSALS:
            self._audit.say_seldom(Action.CALL_REFUSE, method, outcome, caller=caller)


def caller_of(context: Context) -> Caller:
    """Who is calling: the name in the certificate, or else the address without its port."""
    peer = peer_of(context)
    if peer is not None:
        return Caller(peer.identity.name, peer.identity.role)
    return Caller(context.peer().rpartition(":")[0], "anonymous")


def _object_of(request: Any) -> str:
    """The run that a request is about; nothing else of a request is said."""
    return str(getattr(request, "run_id", ""))
