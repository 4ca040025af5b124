"""The uploads that are under way: each ends in the event that the session waits for."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc

from atoll.client.disk.spool import Entry, Spool
from atoll.client.policy.decide import Decision, Outcome
from atoll.client.session.events import Answered, Event, Key, ReportFailure, UploadCut
from atoll.client.wire.control_stream import Link
from atoll.client.wire.coordinator_connection import Line
from atoll.client.wire.upload import Pace, upload
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import atoll_pb2_grpc as rpc
from atoll.protocol import crash_points
from atoll.protocol.printable import in_mb
from atoll.protocol.vocabulary import Digest, FailureReason, RoundId
from atoll.protocol.wire.stream import StreamBroken

logger = logging.getLogger(__name__)

UPLOADS_MAX = 4
"""Uploads at the same time; the others wait."""

REFUSED = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION})
"""An upload that ends so is of no use to repeat: the two sides do not understand each other."""


class Uploads:
    """Sends entries of the spool over whichever connection stands.

    Args:
        spool: where the updates lie.
        line: to the coordinator.
        bytes_per_s: that all of them together may use; 0: no limit.
        spawn: runs a coroutine whose failure ends the agent.
        on_event: Answered or UploadCut, called on the event loop.
        ask: the site's own policy, before each attempt.
        tell: says to the coordinator that an update is given up.
    """

    def __init__(
        self,
        spool: Spool,
        line: Line,
        *,
        bytes_per_s: int,
        spawn: Callable[[Coroutine[Any, Any, Event]], asyncio.Task[Event]],
        on_event: Callable[[Event], None],
        ask: Callable[[Entry], Decision],
        tell: Callable[[ReportFailure], None],
    ) -> None:
        self._spool, self._line, self._spawn, self._on_event = spool, line, spawn, on_event
        self._ask, self._tell = ask, tell
        self._slots, self._pace = asyncio.Semaphore(UPLOADS_MAX), Pace(bytes_per_s)
        self._tried = set(spool.entries().values())  # updates of which the coordinator may have a part
        self._running: dict[Key, asyncio.Task[Event]] = {}
        self._waiting: dict[Key, tuple[Link, float]] = {}  # updates that go to a rank: since when no byte arrives

    def begin(self, key: Key, digest: Digest) -> None:
        """Send an update from wherever the coordinator's copy of it ends."""
        task = self._running[key] = self._spawn(self._send(key, digest))
        task.add_done_callback(lambda task: self._finished(key, task))

    def ask_again(self) -> None:
        """The policy has changed: an upload that it no longer allows ends where it is."""
        for key, task in list(self._running.items()):
            if not (decision := self._ask(self._spool[key])).is_allowed:
                del self._running[key]
                task.cancel()
                self._on_event(self._held_back(key, decision))

    def discard(self, key: Key, digest: Digest) -> None:
        """Delete an update from the spool, and end its upload."""
        if (task := self._running.pop(key, None)) is not None:
            task.cancel()
        self._tried.discard(digest)
        self._waiting.pop(key, None)
        self._spool.discard(key)

    def _finished(self, key: Key, task: asyncio.Task[Event]) -> None:
        if self._running.get(key) is not task:
            return  # discarded meanwhile
        del self._running[key]
        if not (task.cancelled() or task.exception()):
            self._on_event(task.result())

    async def _send(self, key: Key, digest: Digest) -> Event:
        entry = self._spool[key]
        is_first_attempt = digest not in self._tried
        self._tried.add(digest)
        async with self._slots:
            if not (decision := self._ask(entry)).is_allowed:
                return self._held_back(key, decision)
            try:
                verdict = await self._verdict(entry, key, is_first_attempt)
            except StreamBroken as error:
                if error.code not in REFUSED:
                    logger.info("the upload was cut (%s), and will go on where it stopped", error)
                    return UploadCut(key)
                return self._give_up(key, str(error))
            except OSError as error:
                return self._give_up(key, str(error))
        crash_points.reached("agent.answered")
        if verdict.accepted:
            logger.info("the update of round %d of %s is accepted", key[2], key[1])
        else:
            why = f"{verdict.reason}: {verdict.detail}"
            logger.warning("the update of round %d of %s is refused: %s", key[2], key[1], why)
        return Answered(key, verdict.accepted, verdict.reason, verdict.detail, verdict.resend)

    async def _verdict(self, entry: Entry, key: Key, is_first_attempt: bool) -> pb.Verdict:
        link = self._line.current
        if link is None:
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, "there is no connection")
        calls = self._calls_of_rank(key, entry.rank, link) if self._line.ranks.num_ranks else link.calls()
        logger.info("uploading the update of round %d of %s, %s", key[2], key[1], in_mb(entry.num_bytes))

        def goes_on() -> None:
            self._waiting[key] = link, asyncio.get_running_loop().time()

        async with calls as stub:
            verdict = await upload(stub, entry, self._pace, is_first_attempt=is_first_attempt, goes_on=goes_on)
        self._waiting.pop(key, None)
        return verdict

    def _calls_of_rank(self, key: Key, rank: int, link: Link) -> AbstractAsyncContextManager[rpc.AggregatorStub]:
        now = asyncio.get_running_loop().time()
        if (
            key not in self._waiting or self._waiting[key][0] is not link
        ):  # what the coordinator's absence cost: nothing
            self._waiting[key] = link, now
        ranks = self._line.ranks
        return ranks.connection(ranks.rank_for_update(rank, now - self._waiting[key][1])).calls()

    def _held_back(self, key: Key, decision: Decision) -> Event:
        """The policy has its say about every attempt. What it refuses is not kept; what has to wait is asked again."""
        why = f"{decision.rule}: {decision.detail}"
        if decision.outcome is Outcome.REFUSED:
            return self._give_up(key, why, FailureReason.POLICY_REFUSED)
        logger.info("the update of round %d of %s is not sent yet: %s", key[2], key[1], why)
        return UploadCut(key)

    def _give_up(self, key: Key, detail: str, reason: FailureReason = FailureReason.UPLOAD_FAILED) -> Event:
        """Neither cut nor answered: something is wrong, here or there, that time does not heal."""
        _, run_id, round_id = key
        logger.error("the update of round %d of %s cannot be sent: %s", round_id, run_id, detail)
        self._tell(ReportFailure(run_id, RoundId(round_id), reason, detail))
        return Answered(key, accepted=False, detail=detail)
