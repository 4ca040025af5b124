"""The judge of an update or a reply: it asks the machine of its run, in this process.

Checks run in the order of their cost; checks of the manifest alone come before any byte is sent. The receiver of the
bytes, this process or an aggregation rank (`ranks`), asks the judge before and after the upload.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import Digest, RejectReason
from atoll.server.files.run_store import KeptUpdate
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.rounds.events import Accept, Reject, Update, UpdateReceived, UpdateRefused, UploadBegun
from atoll.server.transfers.verdicts import refused

R = TypeVar("R", RunDriver, MessageDriver)


@dataclass(frozen=True, slots=True)
class Judge(ABC, Generic[R]):
    """Judge of one update of a run, of rounds or of messages; see `transfers.uploads.Judging`."""

    run: R
    manifest: UpdateManifest
    update: Update
    part: PartManifest | None = None
    """The part whose bytes follow; None: the update has none."""

    async def before_bytes(self) -> pb.Verdict | None:
        """Return the verdict that is possible before the bytes arrive; None: the bytes are wanted."""
        run, update = self.run, self.update
        if (verdict := await self.old_verdict()) is not None:
            return verdict
        if (refusal := run.machine.refusal(update)) is not None:
            await run.on_disk()  # the refusal changes nothing and is not journaled, but its grounds must be on disk
            return refused(*refusal)
        if (verdict := await self.on_manifest()) is not None:
            return verdict
        if run.is_first_upload(update):
            run.post(UploadBegun(update.client_id, update.round_id))
        return None

    @abstractmethod
    async def on_manifest(self) -> pb.Verdict | None:
        """Return the refusal that follows from the manifest; None: it is sound."""

    @abstractmethod
    async def old_verdict(self) -> pb.Verdict | None:
        """Repeat the verdict on an already accepted update, once its grounds are on disk; None: it was not accepted."""

    @abstractmethod
    async def cover(self, parts: Iterable[PartManifest]) -> pb.Verdict | None:
        """Return the refusal of an update whose combined parts the run does not accept."""

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """Let the machine decide about a sound update; the decision is on disk when this returns."""
        for effect in await self.run.post(UpdateReceived(self.update), kept):
            if isinstance(effect, Accept) and effect.digest == self.update.digest:
                return accepted(is_carried=effect.carried)
            if isinstance(effect, Reject) and effect.digest == self.update.digest:
                return await self.old_verdict() or refused(effect.reason, effect.detail)
        raise AssertionError("the machine did not answer an update")

    async def withdraw(self, digest: Digest) -> bool:
        """Return False: parts that are kept here but not accepted may be discarded at any time."""
        return False

    async def refuse(self, reason: RejectReason, detail: str) -> pb.Verdict:
        """Refuse the update because of its manifest or its bytes."""
        if self.run.is_news(self.update.client_id, self.update.round_id):
            await self.run.post(UpdateRefused(self.update.client_id, self.update.round_id, reason, detail))
        return refused(reason, detail)


def accepted(*, is_carried: bool = False) -> pb.Verdict:
    """Return the verdict on an accepted update, which counts in a later round if it is carried over."""
    return pb.Verdict(accepted=True, detail="late" if is_carried else "")
