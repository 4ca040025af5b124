"""The uploads of finished updates: each ends with an event for the session."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from atoll.client.disk.spool import Entry, EntryPart, Spool
from atoll.client.phases import UPLOAD, Phases
from atoll.client.policy.decide import Decision, Outcome
from atoll.client.session.events import Answered, Event, Key, ReportFailure, UploadCut
from atoll.client.wire.control_stream import Link
from atoll.client.wire.coordinator_connection import CoordinatorConnection
from atoll.client.wire.part_uploads import REFUSED, verdict_on
from atoll.client.wire.rotating_channel import RotatingChannel
from atoll.client.wire.transfer_log import told
from atoll.client.wire.upload import Pace, upload
from atoll.ground.printable import printable_size
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import services as rpc
from atoll.protocol.disclosure import Disclosure
from atoll.protocol.log_fields import about
from atoll.protocol.vocabulary import Digest, FailureReason, RoundId
from atoll.protocol.wire.stream import StreamBroken

logger = logging.getLogger(__name__)

UPLOADS_MAX = 4
"""Concurrent uploads; further ones wait."""


class Uploads:
    """Sender of spooled updates over the open session, to the coordinator or to the update's rank.

    Args:
        spool: holds the updates.
        connection: the connection to the coordinator and its aggregation ranks.
        bytes_per_s: rate of all uploads together; 0: no limit.
        spawn: runs a coroutine whose failure ends the agent.
        on_event: receives Answered or UploadCut, on the event loop.
        ask: decides by the site's policy, before each attempt.
        report: sends the coordinator the failure of an update that is given up.
    """

    def __init__(
        self,
        spool: Spool,
        connection: CoordinatorConnection,
        *,
        bytes_per_s: int,
        spawn: Callable[[Coroutine[Any, Any, Event]], asyncio.Task[Event]],
        on_event: Callable[[Event], None],
        ask: Callable[[Entry], Decision],
        report: Callable[[ReportFailure], None],
        disclosure: Callable[[Entry], Disclosure],
    ) -> None:
        self._spool, self._connection, self._spawn, self._on_event = spool, connection, spawn, on_event
        self._ask, self._report, self._disclosure = ask, report, disclosure
        self._slots, self._pace = asyncio.Semaphore(UPLOADS_MAX), Pace(bytes_per_s)
        self._one_in_parts = asyncio.Lock()  # its streams share the calls of a connection with other updates' streams
        self._tried = set(spool.entries().values())  # updates of which the coordinator may have a part
        self._running: dict[Key, asyncio.Task[Event]] = {}
        self._begun: dict[Key, float] = {}  # by `time.monotonic`, of each first attempt
        self.phases = Phases()
        self._stalled: dict[Key, dict[int, tuple[Link, float]]] = {}
        """Time [s, event loop] since the last byte of each upload to a rank, and the session that it uses; by update
        and, if its parts are spread, by part (else 0)."""

    def begin(self, key: Key, digest: Digest) -> None:
        """Send an update, starting where the receiver's copy of it ends."""
        self._begun.setdefault(key, time.monotonic())
        task = self._running[key] = self._spawn(self._send(key, digest))
        task.add_done_callback(lambda task: self._finished(key, task))

    def ask_again(self) -> None:
        """Check every running upload against the changed policy, and end those that it does not allow."""
        for key, task in list(self._running.items()):
            if not (decision := self._ask(self._spool[key])).is_allowed:
                del self._running[key]
                task.cancel()
                self._on_event(self._held_back(key, decision))

    def discard(self, key: Key, digest: Digest) -> None:
        """End an update's upload, and delete it from the spool."""
        if (task := self._running.pop(key, None)) is not None:
            task.cancel()
        self._over(key, "not_wanted")
        self._tried.discard(digest)
        self._stalled.pop(key, None)
        self._spool.discard(key)

    def _finished(self, key: Key, task: asyncio.Task[Event]) -> None:
        if self._running.get(key) is not task:
            return  # discarded meanwhile
        del self._running[key]
        if not (task.cancelled() or task.exception()):
            if isinstance(event := task.result(), Answered):
                self._over(key, "" if event.accepted else event.reason or FailureReason.UPLOAD_FAILED)
            self._on_event(event)

    def _over(self, key: Key, fault: str) -> None:
        """Note the end of an upload, of all its attempts together."""
        if (begun := self._begun.pop(key, None)) is not None:
            self.phases.note(UPLOAD, key, begun, fault=str(fault))

    async def _send(self, key: Key, digest: Digest) -> Event:
        with about(run=key[1], round=key[2]):
            return await self._attempt(key, digest)

    async def _attempt(self, key: Key, digest: Digest) -> Event:
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
                    logger.info("the upload was cut (%s), and will resume where it stopped", error)
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
        link = self._connection.current
        if link is None:
            raise StreamBroken(grpc.StatusCode.UNAVAILABLE, "there is no connection")
        what = f"uploading the update of round {key[2]} of {key[1]}"
        confirmed: dict[int, int] = {}  # bytes of each part
        logger.info("%s, %s", what, printable_size(entry.num_bytes))

        async def send(index: int, part: EntryPart | None) -> pb.Verdict | None:
            turn = index if entry.spreads else 0

            def confirm(position: int) -> None:
                confirmed[index] = position
                self._stalled.setdefault(key, {})[turn] = link, asyncio.get_running_loop().time()

            channel, num_bytes = self._receiver(key, entry.rank, turn, link), (part or entry).num_bytes
            async with await channel.bulk_calls(num_bytes) as stub:
                verdict = await upload(
                    stub,
                    entry,
                    self._pace,
                    is_first_attempt=is_first_attempt,
                    part=part,
                    disclosure=self._disclosure(entry),
                    on_progress=confirm,
                )
            self._stalled.get(key, {}).pop(turn, None)
            return verdict

        with told(what, entry.num_bytes, lambda: sum(confirmed.values())):
            if entry.parts:
                async with self._one_in_parts:
                    verdict = await verdict_on([partial(send, *part) for part in enumerate(entry.parts)])
            else:
                verdict = await verdict_on([partial(send, 0, None)])
        self._stalled.pop(key, None)
        return verdict

    def _receiver(self, key: Key, rank: int, turn: int, link: Link) -> RotatingChannel[rpc.Stub]:
        """Choose the receiver: the coordinator, or a rank by its turn and by the time without progress.

        A new session restarts that time, because the coordinator was away.
        """
        ranks = self._connection.ranks
        if not ranks.num_ranks:
            return link.connection
        now, stalled = asyncio.get_running_loop().time(), self._stalled.setdefault(key, {})
        if turn not in stalled or stalled[turn][0] is not link:
            stalled[turn] = link, now
        return ranks.connection(ranks.rank_for_update(rank + turn, now - stalled[turn][1]))

    def _held_back(self, key: Key, decision: Decision) -> Event:
        """Give up an update that the policy refuses, or postpone one that must wait; return the session's event."""
        why = f"{decision.rule}: {decision.detail}"
        if decision.outcome is Outcome.REFUSED:
            return self._give_up(key, why, FailureReason.POLICY_REFUSED)
        logger.info("the update of round %d of %s is not sent yet: %s", key[2], key[1], why)
        return UploadCut(key)

    def _give_up(self, key: Key, detail: str, reason: FailureReason = FailureReason.UPLOAD_FAILED) -> Event:
        """Report an update that no further attempt can deliver, and end its upload as not accepted."""
        _, run_id, round_id = key
        logger.error("the update of round %d of %s cannot be sent: %s", round_id, run_id, detail)
        self._report(ReportFailure(run_id, RoundId(round_id), reason, detail))
        return Answered(key, accepted=False, detail=detail)
