"""The judge of a reply to a message."""

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.manifest import UpdateManifest, digest_of
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.vocabulary import RejectReason
from atoll.server.hosting.judge import Judge, accepted
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.rounds.events import Update


@dataclass(frozen=True, slots=True)
class MessageJudge(Judge[MessageDriver]):
    """Judge of one reply."""

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

    async def on_manifest(self) -> pb.Verdict | None:
        """Return the refusal of a manifest that does not fit a reply to its message; None: it is sound."""
        fault = self._fault()
        return await self.refuse(RejectReason.WRONG_LAYOUT, fault) if fault else None

    def _fault(self) -> str:
        """Return why the manifest is not a valid reply's; empty: it is."""
        manifest, most = self.manifest, self.run.config.program.reply_max
        sent = self.run.machine.ledger.sent(manifest.round_id)
        if sent is None or sent.message.content != manifest.base_digest:
            return f"message {manifest.round_id} does not have the content {manifest.base_digest[:12]}"
        if manifest.parts:
            return "a reply must be sent whole, not in parts"
        if manifest.num_bytes > most:
            return f"a reply of {count_of(manifest.num_bytes, 'byte')}; allowed: at most {most} (program.reply_max)"
        names = [piece.tensor for piece in manifest.pieces]
        if any(piece.dtype != "U8" or piece.codec or any(piece.offsets) for piece in manifest.pieces):
            return "a reply consists of plain tensors of bytes, in one piece each"
        return "" if len(set(names)) == len(names) else "a reply has each tensor once"

    async def cover(self, parts: Iterable[PartManifest]) -> pb.Verdict | None:
        """Refuse a reply in parts."""
        return await self.refuse(RejectReason.WRONG_LAYOUT, "a reply must be sent whole, not in parts")

    async def old_verdict(self) -> pb.Verdict | None:
        """Repeat the verdict on an already accepted reply, once its grounds are on disk; None: it was not accepted."""
        await self.run.on_disk()
        return accepted() if await self.run.has_reply(self.update) else None
