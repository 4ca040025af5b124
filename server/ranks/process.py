"""The process of an aggregation rank: its data plane, one stream to the coordinator, one directory."""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from atoll.ground.durable import write_atomically
from atoll.ground.folder_id import folder_id
from atoll.ground.process import crash_points
from atoll.ground.process.core_dumps import leave_memory_out_of_core_dumps
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.displaced import Displaced
from atoll.protocol.identity.credential import Credential
from atoll.protocol.identity.handshake_fault import explained, is_handshake_failure
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.membership import Membership, unless_stopped
from atoll.protocol.identity.names import COORDINATOR, aggregator
from atoll.protocol.identity.renewal import MembershipEnded
from atoll.protocol.notices.life import Life
from atoll.protocol.settings import ConfigError
from atoll.protocol.signals import call_at_end
from atoll.protocol.wire.bulk_messages import add_aggregator
from atoll.protocol.wire.channel import PROTOCOL, reached_as, server_options
from atoll.protocol.wire.stream import Stream, StreamBroken
from atoll.server.config.process import AggregatorConfig
from atoll.server.errors import OperatorError
from atoll.server.identity.guard import Guard
from atoll.server.identity.setup import identity_folder
from atoll.server.journal.holder import lock_directory
from atoll.server.journal.placement import take_place
from atoll.server.process_tuning import allow_open_files
from atoll.server.ranks.rank import Rank, RankPlace
from atoll.server.ranks.rank_service import AggregatorService
from atoll.server.transport.call_limits import CallLimits, Connections
from atoll.server.transport.limits import Callers, calls_max, connections_max
from atoll.server.transport.listener import InsecureListener, Listener, MutualListener, cannot_listen
from atoll.server.transport.shutdown import stop_servers
from atoll.tensors.codecs.names import supported

logger = logging.getLogger(__name__)

DIAL_S = 0.5
"""Wait between two attempts to reach the coordinator [s]."""

DISPLACED_S = 10.0
"""First wait while another process uses the place of this rank [s]."""

CALLS_PER_CLIENT = 16


async def host_rank(
    config: AggregatorConfig,
    *,
    with_parent: bool = False,
    on_ready: Callable[[Rank, Keeper | None, str], None] = lambda rank, keeper, address: None,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Serve as one rank until a signal arrives or, `with_parent`, until standard input ends; `on_end` is called then.

    Args:
        config: the settings of the process.
        with_parent: end when the parent process closes standard input.
        on_ready: called with the rank, its credential (None: insecure), and the address of its data plane.
        on_end: called when the rank begins to end.

    Raises:
        OperatorError, OSError: the directory belongs to another rank, the port is taken, the interface does not exist,
            or the coordinator at that address has no such rank.
        ConfigError: the rank has no valid credential.
    """
    leave_memory_out_of_core_dumps()
    allow_open_files()
    lock = lock_directory(config.state)
    life = Life(config.state)
    try:
        take_place(config.state, config.rank, config.ranks)
        life.tell()
        who, here = aggregator(config.rank), identity_folder(config.state)
        where = {"join": config.join, "coordinator": config.coordinator, "insecure": config.insecure}
        taking = Membership.take(here, who, **where)  # type: ignore[arg-type]
        if (membership := await unless_stopped(taking)) is None:
            return
        channels = [membership.dialer.channel(membership.address, COORDINATOR)]
        try:
            place = RankPlace(config.rank, config.ranks, config.interface, folder_id(config.state))
            rank = Rank(place, config.state, channels[0])
            rank.keeper = membership.keeper

            def renewed(_: Credential) -> None:  # running calls continue on the older channel
                channels.append(membership.dialer.channel(membership.address, COORDINATOR))
                rank.connect(channels[-1])

            if membership.keeper is not None:
                membership.keeper.on_replaced(renewed)
            await _serve(rank, config, membership, with_parent=with_parent, on_ready=on_ready, on_end=on_end)
        finally:
            for channel in channels:
                await channel.close()
    finally:
        life.close()
        os.close(lock)


async def _serve(
    rank: Rank,
    config: AggregatorConfig,
    membership: Membership,
    *,
    with_parent: bool,
    on_ready: Callable[[Rank, Keeper | None, str], None],
    on_end: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    call_at_end(stop.set, "stopped by %s: the rank ends")
    server, bound = await _listen(rank, config, _listener(membership))
    address = reached_as(bound, config.public)

    def read_input() -> None:
        if not os.read(0, 1024):
            stop.set()

    if with_parent:
        asyncio.get_running_loop().add_reader(0, read_input)
    on_ready(rank, membership.keeper, address)
    work: list[asyncio.Future[Any]] = [asyncio.ensure_future(_keep_connected(rank, address, membership))]
    if membership.keeper is not None:
        work.append(asyncio.ensure_future(membership.keep()))
    waiting = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait({*work, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
    finally:
        on_end()
        for task in (*work, waiting):
            task.cancel()
        rank.stop()
        await stop_servers((server, bound))


def _listener(membership: Membership) -> Listener:
    return InsecureListener() if membership.keeper is None else MutualListener(membership.keeper)


async def _listen(rank: Rank, config: AggregatorConfig, listener: Listener) -> tuple[grpc.aio.Server, str]:
    """Bind the data plane; for port 0 try the last port first, because clients know it."""
    register = rank.admission if listener.proves_callers else None
    memory, listens = config.state / "address", [config.listen]
    if config.listen.endswith(":0") and memory.exists():
        listens.insert(0, f"{config.listen[:-2]}:{memory.read_text().rpartition(':')[2]}")
    for listen in listens:
        limits = CallLimits(Callers(CALLS_PER_CLIENT), Connections().end)
        server = grpc.aio.server(
            interceptors=[limits, Guard(register, listener.proven)],
            options=server_options(connections_max=connections_max(config.max_connections)),
            maximum_concurrent_rpcs=calls_max(config.max_connections, CALLS_PER_CLIENT),
        )
        add_aggregator(AggregatorService(rank), server)
        try:
            address = listener.bind(server, listen)
        except (OperatorError, ConfigError):
            continue
        await server.start()
        write_atomically(memory, address.encode())
        return server, address
    raise cannot_listen(config.listen)


async def _keep_connected(rank: Rank, address: str, membership: Membership) -> None:
    """Keep a stream to the coordinator open, and open another one whenever it breaks.

    Raises:
        OperatorError: the coordinator has no such rank.
        MembershipEnded: this rank's membership was revoked.
    """
    coordinator, last_logged = membership.address, ""
    displaced = Displaced(DISPLACED_S, random.SystemRandom())
    while True:
        begun_at = time.monotonic()
        try:
            await _follow_orders(rank, address)
            last_logged = ""
        except StreamBroken as error:
            if error.is_revoked:
                raise MembershipEnded([f"{error.detail}: this rank ends; it needs a new join code"]) from None
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                raise OperatorError(f"the coordinator refuses this rank: {error.detail}") from None
            if error.code is grpc.StatusCode.UNIMPLEMENTED:
                what = f"{coordinator} is not a coordinator with aggregation ranks"
                raise OperatorError(f"{what}: name another address, or start it with --aggregators N") from None
            displaced.held_for(time.monotonic() - begun_at)
            if error.is_displaced:
                wait, level = displaced.next_wait(), logging.WARNING if displaced.is_news else logging.DEBUG
                logger.log(
                    level, "another process is rank %d: %s; trying again in %.1f s", rank.place.rank, error.detail, wait
                )
                await asyncio.sleep(wait)
                continue
            cause = "TLS" if is_handshake_failure(error.detail) else error.code.name
            if cause != last_logged:
                last_logged, why = cause, await explained(str(error), coordinator, membership.dialer.credential)
                logger.warning("no connection to the coordinator on %s: %s; trying again", coordinator, why)
        await asyncio.sleep(DIAL_S)


async def _follow_orders(rank: Rank, address: str) -> None:
    """Run one stream, from RankHello to its end."""
    stream: Stream[pb.RankMessage, pb.RankOrder] = Stream(rank.aggregation.Serve)
    place = rank.place
    hello = pb.RankHello(
        protocol=PROTOCOL,
        rank=place.rank,
        num_ranks=place.num_ranks,
        address=address,
        store_address=rank.meeting_point.address,
        process=place.process,
        folder=place.folder_id,
        codecs=supported(),
    )
    orders = _Orders(rank, stream)
    try:
        await stream.write(pb.RankMessage(hello=hello))
        while (order := await stream.read()) is not None:
            orders.begin(order)
    finally:
        orders.end()
        stream.cancel()


class _Orders:
    """Orders of the coordinator on one stream, executed concurrently."""

    def __init__(self, rank: Rank, stream: Stream[pb.RankMessage, pb.RankOrder]) -> None:
        self._rank, self._stream = rank, stream
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()  # grpc loses a message that is written during another write
        self._plan = bytearray()

    def begin(self, order: pb.RankOrder) -> None:
        """Start executing an order; ignore an unknown one."""
        match order.WhichOneof("order"):
            case "welcome":
                self._spawn(self._report(order.welcome.status_s))
            case "plan_part":
                self._plan += order.plan_part
            case "fold":
                plan, self._plan = bytes(self._plan + order.fold.plan), bytearray()
                self._spawn(self._fold(order.fold, plan, self._rank.begin_fold(order.fold.attempt)))
            case "break_off":
                self._rank.break_off(order.break_off)
            case "collect":
                self._spawn(self._rank.collect(order.collect))
            case _:
                pass

    def end(self) -> None:
        """End all orders: nothing can be reported any more, and the coordinator starts a new attempt at the fold."""
        self._rank.stop()
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("an order failed, the stream is opened again", exc_info=error)  # a mistake of ours
            self._stream.cancel()

    async def _send(self, message: pb.RankMessage) -> None:
        async with self._writing:
            await self._stream.write(message)

    async def _report(self, every: float) -> None:
        while True:
            await self._send(self._rank.status())
            await asyncio.sleep(every)

    async def _fold(self, order: pb.Fold, plan: bytes, stop: threading.Event) -> None:
        answer = await self._rank.fold(order, plan, stop)
        if answer.HasField("folded"):
            crash_points.reached("rank.folded")
        await self._send(self._rank.status())
        await self._send(answer)
