"""The judge of a reply to a message: it asks the machine of a run of messages, in this process."""

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.aggregation.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest, digest_of
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import Digest, RejectReason
from atoll.server.files.run_store import KeptUpdate
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.rounds.events import Accept, Reject, Update, UpdateReceived, UpdateRefused, UploadBegun
from atoll.server.transfers.verdicts import refused


@dataclass(frozen=True, slots=True)
class MessageJudge:
    """The judge of one reply; see `transfers.uploads.Judging`."""

    run: MessageDriver
    manifest: UpdateManifest
    update: Update

    @classmethod
    def of(cls, run: MessageDriver, manifest: UpdateManifest, opened: pb.UploadOpen) -> "MessageJudge":
        """Make the judge of a reply that a client announces."""
        update = Update(
            client_id=manifest.client_id,
            round_id=manifest.round_id,
            base_version=manifest.base_version,
            digest=digest_of(opened.manifest),
            num_examples=manifest.num_examples,
            work=manifest.work,
            num_bytes=manifest.num_bytes,
        )
        return cls(run, manifest, update)

    async def before_bytes(self) -> pb.Verdict | None:
        """Return the verdict that is possible before the bytes come; None: the bytes are wanted."""
        machine, update = self.run.machine, self.update
        if (verdict := await self.old_verdict()) is not None:
            return verdict
        if (refusal := machine.refusal(update)) is not None:
            await self.run.on_disk()
            return refused(*refusal)
        if fault := self._fault():
            return await self.refuse(RejectReason.WRONG_LAYOUT, fault)
        sent = machine.ledger.sent(update.round_id)
        if sent is not None and not sent.has_begun:
            self.run.post(UploadBegun(update.client_id, update.round_id))
        return None

    def _fault(self) -> str:
        """Return why the manifest is not that of a reply; empty: it is."""
        manifest, most = self.manifest, self.run.config.program.reply_max
        sent = self.run.machine.ledger.sent(manifest.round_id)
        if sent is None or sent.message.content != manifest.base_digest:
            return f"message {manifest.round_id} does not have the content {manifest.base_digest[:12]}"
        if manifest.parts:
            return "a reply comes whole, not in parts"
        if manifest.num_bytes > most:
            return f"a reply of {count_of(manifest.num_bytes, 'byte')}; allowed: at most {most} (program.reply_max)"
        names = [piece.tensor for piece in manifest.pieces]
        if any(piece.dtype != "U8" or piece.codec or any(piece.offsets) for piece in manifest.pieces):
            return "a reply consists of plain tensors of bytes, in one piece each"
        return "" if len(set(names)) == len(names) else "a reply has each tensor once"

    async def cover(self, parts: Iterable[PartManifest]) -> pb.Verdict | None:
        """Refuse a reply in parts."""
        return await self.refuse(RejectReason.WRONG_LAYOUT, "a reply comes whole, not in parts")

    async def old_verdict(self) -> pb.Verdict | None:
        """Repeat the verdict on a reply that was accepted before, once its grounds are on disk; None: it was not."""
        await self.run.on_disk()
        return pb.Verdict(accepted=True) if await self.run.has_reply(self.update) else None

    async def decide(self, kept: KeptUpdate | None) -> pb.Verdict:
        """Let the machine decide about a sound reply; the decision is on disk when this returns."""
        for effect in await self.run.post(UpdateReceived(self.update), kept):
            if isinstance(effect, Accept) and effect.digest == self.update.digest:
                return pb.Verdict(accepted=True)
            if isinstance(effect, Reject) and effect.digest == self.update.digest:
                return await self.old_verdict() or refused(effect.reason, effect.detail)
        raise AssertionError("the machine did not answer a reply")

    async def withdraw(self, digest: Digest) -> bool:
        """Return False: a reply has no parts, so that no kept ones are in its way."""
        return False

    async def refuse(self, reason: RejectReason, detail: str) -> pb.Verdict:
        """Refuse the reply because of its manifest or its bytes."""
        if self.run.machine.waits_for(self.update.client_id, self.update.round_id):
            await self.run.post(UpdateRefused(self.update.client_id, self.update.round_id, reason, detail))
        return refused(reason, detail)
