"""The interceptor that records every admin call, with caller and outcome, and every refused call in the audit log.

Admin calls have no budget, even failed ones. Repeated refused calls are soon only counted, so that a caller without
rights cannot fill the log. The interceptor runs before all others, so it also records their refusals.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from atoll.ground.printable import printable
from atoll.protocol.audit.chain import USER_MAX
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
"""Status codes that are recorded as refusals; all others happen to honest clients, too."""


class CallAudit(Interceptor):
    """Interceptor that records the calls of a server, and sets the caller that `acting` names.

    Args:
        audit: the log.
    """

    def __init__(self, audit: AuditLog) -> None:
        super().__init__(self._audited)
        self._audit = audit

    @asynccontextmanager
    async def _audited(self, method: str, request: Any, context: Context) -> AsyncIterator[None]:
        caller, has_ended = replace(caller_of(context), on_behalf_of=_user_of(request)), False
        try:
            if method.startswith(ADMIN):
                with acting(caller):
                    yield
            else:
                yield
            has_ended = True
        finally:
            code = code_of(context)
            if code is grpc.StatusCode.OK and not has_ended:  # a cut call has no code yet
                code = grpc.StatusCode.CANCELLED
            self._record(method, _object_of(request), context, caller, code)

    def _record(self, method: str, about: str, context: Context, caller: Caller, code: grpc.StatusCode) -> None:
        outcome = code.name if code is grpc.StatusCode.OK else f"{code.name}: {context.details() or ''}"
        if method.startswith(ADMIN):
            object_ = f"{method} {about}".rstrip()
            if code is grpc.StatusCode.OK:
                self._audit.record(Action.CALL, object_, outcome, caller=caller)
            else:  # counted without the run, because a caller may name any number of runs
                self._audit.record_bounded(Action.CALL, object_, outcome, caller=caller, counted_as=method)
        elif code in REFUSALS:
            self._audit.record_bounded(Action.CALL_REFUSE, method, outcome, caller=caller)


def caller_of(context: Context) -> Caller:
    """Return the caller: the name in its certificate, or else its address without the port."""
    peer = peer_of(context)
    if peer is not None:
        return Caller(peer.identity.name, peer.identity.role)
    return Caller(context.peer().rpartition(":")[0], "anonymous")


def _user_of(request: Any) -> str:
    """Return the user for whom a caller says that it acts, on one line, of which the log has the first `USER_MAX`."""
    return printable(str(getattr(request, "on_behalf_of", ""))[: USER_MAX + 1])


def _object_of(request: Any) -> str:
    """Return the run that a request names; nothing else of a request is recorded."""
    return str(getattr(request, "run_id", ""))
