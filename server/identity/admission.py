"""The admission of callers: members whose certificate is not revoked and, for a run, only clients that have joined it.

The coordinator knows both. An aggregation rank asks it before it serves a caller, and again while a call is open; if it
cannot ask, it refuses the caller.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.identity.names import Identity, Role
from atoll.protocol.vocabulary import ClientId, RunId
from atoll.server.identity.guard import Caller, Denied
from atoll.server.transport.peer import Peer

ASK_TIMEOUT_S = 2.0
"""Time within which the coordinator must answer a rank [s]."""

FRESH_S = 1.0
"""Time after which a rank asks about a caller again [s]."""

STALE_S = 5.0
"""Time for which a rank serves already admitted callers while the coordinator is away [s]."""


class Admission:
    """Admission at the coordinator, which knows the members and the runs.

    Args:
        is_revoked: returns True for a revoked certificate, by identity and serial number.
        has_joined: returns True if a client is a member of a run.
    """

    def __init__(
        self, is_revoked: Callable[[Identity, int], bool], has_joined: Callable[[ClientId, RunId], bool]
    ) -> None:
        self.is_revoked, self._has_joined = is_revoked, has_joined

    async def refusals(self, callers: Sequence[Caller]) -> Sequence[Denied | None]:
        """Return the refusal of each caller; None for an admitted caller."""
        return [self._refusal(caller) for caller in callers]

    def _refusal(self, caller: Caller) -> Denied | None:
        (identity, serial), run_id = (caller.peer.identity, caller.peer.serial), caller.run_id
        if self.is_revoked(identity, serial):
            return Denied(grpc.StatusCode.UNAUTHENTICATED, f"the certificate of {identity} is revoked")
        is_client = identity.role is Role.CLIENT
        if run_id is not None and is_client and not self._has_joined(ClientId(identity.name), run_id):
            return Denied(grpc.StatusCode.PERMISSION_DENIED, f"{identity} has not joined run {run_id[:80]!r}")
        return None

    def answer(self, request: pb.AdmitRequest) -> pb.AdmitReply:
        """Answer a rank's question which of its callers are admitted.

        Raises:
            ValueError: the request has an unknown role, or an invalid name.
        """
        return pb.AdmitReply(refusals=[self._answer(caller) for caller in request.callers])

    def _answer(self, asked: pb.Caller) -> pb.Refusal:
        peer = Peer(Identity(Role(asked.role), asked.name), int.from_bytes(asked.serial, "big"))
        denied = self._refusal(Caller(peer, RunId(asked.run_id) if asked.run_id else None))
        if denied is None:
            return pb.Refusal()
        return pb.Refusal(detail=denied.detail, is_revoked=denied.code is grpc.StatusCode.UNAUTHENTICATED)


class AskedAdmission:
    """Admission at a rank: it asks the coordinator, and remembers the answers for a moment.

    Args:
        stub: returns the newest stub of the coordinator.
    """

    def __init__(self, stub: Callable[[], rpc.Stub]) -> None:
        self._stub = stub
        self._admitted: dict[Caller, float] = {}  # the time of the last admission [s, the loop's clock]

    async def refusals(self, callers: Sequence[Caller]) -> Sequence[Denied | None]:
        """Return the refusal of each caller; None for an admitted caller."""
        now = asyncio.get_running_loop().time()
        asked = [caller for caller in callers if not self._is_admitted(caller, now - FRESH_S)]
        denied = await self._ask(asked, now) if asked else {}
        return [denied.get(caller) for caller in callers]

    def _is_admitted(self, caller: Caller, since: float) -> bool:
        return self._admitted.get(caller, -math.inf) > since

    async def _ask(self, callers: Sequence[Caller], now: float) -> dict[Caller, Denied]:
        try:
            request = pb.AdmitRequest(callers=map(_message_of, callers))
            reply: pb.AdmitReply = await self._stub().Admit(request, timeout=ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            what = f"the coordinator cannot be asked about it now ({error.code().name}): try again"
            away = [caller for caller in callers if not self._is_admitted(caller, now - STALE_S)]
            return {c: Denied(grpc.StatusCode.UNAVAILABLE, f"{c.peer.identity}: {what}") for c in away}
        answers = dict(zip(callers, reply.refusals, strict=True))
        denied = {caller: _denied(refusal) for caller, refusal in answers.items() if refusal.detail}
        admitted = dict.fromkeys(answers.keys() - denied, now)
        young = {c: at for c, at in self._admitted.items() if at > now - STALE_S and c not in answers}
        self._admitted = {**young, **admitted}
        return denied


def _message_of(caller: Caller) -> pb.Caller:
    identity, serial = caller.peer.identity, caller.peer.serial
    encoded = serial.to_bytes((serial.bit_length() + 7) // 8, "big")
    return pb.Caller(role=identity.role, name=identity.name, serial=encoded, run_id=caller.run_id or "")


def _denied(refusal: pb.Refusal) -> Denied:
    code = grpc.StatusCode.UNAUTHENTICATED if refusal.is_revoked else grpc.StatusCode.PERMISSION_DENIED
    return Denied(code, refusal.detail)


def joined(runs: Mapping[RunId, Any]) -> Callable[[ClientId, RunId], bool]:
    """Return a function that tells whether a client is a member of one of the runs, by their machines."""

    def has_joined(client_id: ClientId, run_id: RunId) -> bool:
        run = runs.get(run_id)
        return run is not None and client_id in run.machine.ledger.membership.members

    return has_joined
