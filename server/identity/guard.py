"""The guard of a server: it checks each call's caller, its role (`rules`), and that it accesses only its own data.

A gRPC interceptor does not see the caller, so the guard wraps the handler of each method and checks once the call has
begun. Each message is checked before its handler gets it. Callers of open calls are checked again every second: a
revoked member loses its calls.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.identity.clock_hint import instant
from atoll.protocol.identity.names import Role
from atoll.protocol.vocabulary import RunId
from atoll.server.identity.rules import RULES, Rule, Touches, needed
from atoll.server.transport.interceptor import Context, Handler, WrappingInterceptor
from atoll.server.transport.peer import Peer, peer_of

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Interval between two checks of the callers of all open calls [s]."""


_UPDATE_HEAD = re.compile(
    rb'\{(?:"attempt":[0-9]{1,20},)?'
    rb'"base_digest":"[0-9a-f]{64}","base_version":[0-9]{1,20},"client_id":("[^"\\]{1,256}")'
    rb'(?:,"effective_steps":[^,]{1,40})?,"format":'
)
"""Prefix of the canonical bytes of an update's manifest; a parser finds the same client in it."""

SHOWN_MAX = 80
"""Length to which a name is truncated in messages [characters]."""


class Claim(NamedTuple):
    """Name in a message that must belong to the caller: a client, a rank, a run, or a role to grant."""

    touches: Touches
    name: str

    def __str__(self) -> str:
        return repr(self.name[:SHOWN_MAX])


def claim_of(message: Any) -> Claim | None:
    """Return the claim of one message; None if it names nothing, such as a chunk of an already opened upload."""
    match message:
        case pb.ClientMessage() if message.HasField("hello"):
            return Claim(Touches.OWN_NAME, message.hello.client_id)
        case pb.UploadRequest() if message.HasField("open"):
            return Claim(Touches.OWN_NAME, client_of(message.open.manifest))
        case pb.DownloadRequest() if message.HasField("open"):
            return Claim(Touches.OWN_RUNS, message.open.run_id)
        case pb.ManifestRequest():
            return Claim(Touches.OWN_RUNS, message.run_id)
        case pb.RankMessage() if message.HasField("hello"):
            return Claim(Touches.OWN_RANK, str(message.hello.rank))
        case pb.SubmittedUpdate() if message.HasField("opened"):
            return Claim(Touches.OWN_RANK, str(message.rank))
        case pb.UpdatesRequest():
            return Claim(Touches.OWN_RANK, str(message.rank))
        case pb.InviteRequest() | pb.RevokeRequest():
            return Claim(Touches.SITES, message.role)
    return None


def client_of(manifest: bytes) -> str:
    """Return the client that an update's manifest names, without parsing all of it; "" for other bytes."""
    head = _UPDATE_HEAD.match(manifest)
    return str(json.loads(head[1])) if head and head[1].isascii() else ""


class Denied(NamedTuple):
    """Error: the guard refuses a call."""

    code: grpc.StatusCode
    detail: str


class Caller(NamedTuple):
    """Caller, and the run that the call concerns, if any."""

    peer: Peer
    run_id: RunId | None = None


class Register(Protocol):
    """Register of the members, and of the runs that each has joined."""

    async def refusals(self, callers: Sequence[Caller]) -> Sequence[Denied | None]:
        """Return the refusal of each caller, or of its access to the run; None for an admitted caller."""
        ...


@dataclass(slots=True, eq=False)
class _Call:
    """Open call."""

    rule: Rule
    method: str
    peer: Peer
    task: "asyncio.Task[Any]"
    run_id: RunId | None = None
    has_claimed: bool = False  # whether a message has named an object, as the first one of a call must
    denied: Denied | None = None  # the refusal that came after the call had begun


class Guard(WrappingInterceptor):
    """Interceptor that guards every handler of a server.

    Args:
        register: the register of members. None: the server is `--insecure` and on loopback. No identity is proven
            there, and every caller acts under the name that it gives: an owner, any client, any rank. This class alone
            handles that case.
        on_call: called with the peer of each call, named as gRPC does.
    """

    def __init__(self, register: Register | None, on_call: Callable[[str], None] = lambda peer: None) -> None:
        super().__init__()
        self._register, self._on_call = register, on_call
        self._open: set[_Call] = set()
        self._sweeping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ handlers

    def _wrap(self, method: str, handler: Any) -> Handler:
        """Return the guarded handler of a method; the handler itself if the server is `--insecure`."""
        return handler if self._register is None else super()._wrap(method, handler)

    def _stream(self, method: str, behaviour: Any, is_streaming: bool) -> Any:
        async def call(request: Any, context: Context) -> None:
            has_begun = False
            async with self._admitted(method, context) as admitted:
                request = await self._checked(request, admitted, context, is_streaming)
                async with aclosing(behaviour(request, context)) as replies:
                    async for reply in replies:  # with `yield`, gRPC writes, and a refusal meanwhile would be lost
                        await (context.write(reply) if has_begun else _to_its_end(context.write(reply)))
                        has_begun = True

        return call

    def _unary(self, method: str, behaviour: Any, is_streaming: bool) -> Any:
        async def call(request: Any, context: Context) -> Any:
            async with self._admitted(method, context) as admitted:
                request = await self._checked(request, admitted, context, is_streaming)
                return await behaviour(request, context)

        return call

    async def _checked(self, request: Any, call: "_Call | None", context: Context, is_streaming: bool) -> Any:
        if call is None:
            return request
        if is_streaming:
            return self._each_checked(request, call, context)
        await self._check(request, call, context)
        return request

    async def _each_checked(self, requests: AsyncIterator[Any], call: _Call, context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            await self._check(request, call, context)
            yield request

    # ------------------------------------------------------------ checks

    def _admitted(self, method: str, context: Context) -> "AbstractAsyncContextManager[_Call | None]":
        self._on_call(context.peer())
        rule = RULES.get(method)
        return _open_to_all() if rule is not None and rule.is_open else self._admit(rule, method, context)

    @asynccontextmanager
    async def _admit(self, rule: Rule | None, method: str, context: Context) -> AsyncIterator[_Call | None]:
        """Yield the call if its caller may make it; else end the call."""
        peer = peer_of(context)
        if rule is None or peer is None or peer.identity.role not in rule.roles:
            await _deny(context, _fault_of_caller(rule, method, peer), method)
        if peer.expires_at <= time.time():  # expired since the connection was opened; open calls continue
            clock = f"by this machine's clock, which shows {instant(time.time())}"
            what = f"the certificate of {peer.identity} has expired on {instant(peer.expires_at)} {clock}"
            what += ": connect again, with a newer one; if it is not due, compare the clocks of the two machines"
            await _deny(context, Denied(grpc.StatusCode.UNAUTHENTICATED, what), method)
        task = asyncio.current_task()
        assert task is not None
        call = _Call(rule, method, peer, task)
        if (denied := await self._ask(call)) is not None:
            await _deny(context, denied, method)
        self._open.add(call)
        self._begin_sweeping()
        try:
            yield call
        except asyncio.CancelledError:
            if call.denied is None:
                raise
            await _deny(context, call.denied, method)
        finally:
            self._open.discard(call)

    async def _check(self, message: Any, call: _Call, context: Context) -> None:
        """End the call if the message concerns an object that does not belong to the caller."""
        claim, touches = claim_of(message), call.rule.roles[call.peer.identity.role]
        if touches is Touches.NOTHING or (claim is None and call.has_claimed):
            return
        call.has_claimed = True
        if (denied := await self._fault_of(claim, touches, call)) is not None:
            await self._end(call, denied, context)

    async def _fault_of(self, claim: Claim | None, touches: Touches, call: _Call) -> Denied | None:
        if claim is None or claim.touches is not touches:
            return _not_its_own(call, claim)
        if touches is Touches.OWN_RUNS:
            call.run_id = RunId(claim.name)
            return await self._ask(call)
        if touches is Touches.SITES:
            return None if claim.name in (Role.CLIENT, Role.AGGREGATOR) else _not_its_own(call, claim)
        return None if claim.name == call.peer.identity.name else _not_its_own(call, claim)

    async def _end(self, call: _Call, denied: Denied, context: Context) -> None:
        """End a call, even while a task beside the handler is reading its messages."""
        if call.task is asyncio.current_task():
            await _deny(context, denied, call.method)
        call.denied = denied
        call.task.cancel()
        await asyncio.get_running_loop().create_future()  # the reader stops here, until the handler cancels it

    async def _ask(self, call: _Call) -> Denied | None:
        assert self._register is not None
        [denied] = await self._register.refusals([Caller(call.peer, call.run_id)])
        return denied

    # ------------------------------------------------------------ open calls

    def _begin_sweeping(self) -> None:
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def _sweep(self) -> None:
        while self._open:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.look_again()
            except Exception:
                logger.exception("the callers of open calls could not be checked again")

    async def look_again(self) -> None:
        """End the open calls of callers that are no longer admitted."""
        assert self._register is not None
        calls = [call for call in self._open if call.denied is None]
        refusals = await self._register.refusals([Caller(call.peer, call.run_id) for call in calls])
        for call, denied in zip(calls, refusals, strict=True):
            if denied is not None and call in self._open:
                call.denied = denied
                call.task.cancel()


async def _to_its_end(writing: Awaitable[None]) -> None:
    """Write the first reply completely, even if the call is cancelled meanwhile.

    Only after that does gRPC know that the call's header is sent. Otherwise it would try to send the header twice, fail
    to end the call, and the caller would not learn of the refusal.
    """
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


@asynccontextmanager
async def _open_to_all() -> AsyncIterator[None]:
    yield


def _fault_of_caller(rule: Rule | None, method: str, peer: Peer | None) -> Denied:
    if peer is None:
        what = f"{method[1:]} needs the certificate of a member: enrol first"
        return Denied(grpc.StatusCode.UNAUTHENTICATED, what)
    return Denied(grpc.StatusCode.PERMISSION_DENIED, f"{peer.identity} may not call {method[1:]}: {needed(rule)}")


def _not_its_own(call: _Call, claim: Claim | None) -> Denied:
    touches = call.rule.roles[call.peer.identity.role]
    what = f"{call.peer.identity} may call {call.method[1:]} only for {touches}, and named {claim or 'nothing'}"
    return Denied(grpc.StatusCode.PERMISSION_DENIED, what)


async def _deny(context: Context, denied: Denied, method: str) -> NoReturn:
    logger.warning("refused: %s (from %s)", denied.detail, context.peer())
    await context.abort(*denied)
    raise AssertionError("abort raises")
