"""Updates in parts: their streams, what a simulated coordinator keeps of them by the deployed rules, and the checks: no
update counts without all of its parts, and what is kept is not asked for again."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from atoll.client.session import events as client
from atoll.protocol.vocabulary import ClientId, Digest, RejectReason
from atoll.server.parts.gathering import Gathering, newest_first
from atoll.server.rounds.events import Accept, Update
from atoll.server.transfers.timeouts import PARTIALS_MAX
from tests.histories.history import History, PartStep
from tests.histories.network import IN_THE_MANIFEST, Upload, UploadAgent, UploadServer, transfer
from tests.histories.scheduling import World

TOGETHER = RejectReason.WRONG_LAYOUT
"""The fault of a manifest that only all parts together show."""


def num_parts_of(digest: Digest) -> int:
    """Return the number of parts of an update, by its digest; 0: it is sent as a whole."""
    found = re.search(r":p(\d+)", digest)
    return int(found[1]) if found else 0


@dataclass(slots=True)
class KeptParts:
    """The parts that a coordinator has: `kept` is on its disk, the rest is gone after a crash."""

    world: World
    kept: dict[Digest, set[int]] = field(default_factory=dict)
    _gatherings: dict[Digest, Gathering[bool]] = field(default_factory=dict)
    _partial: dict[ClientId, list[str]] = field(default_factory=dict)

    def crashed(self) -> None:
        """Forget what is not on disk."""
        self._gatherings, self._partial = {}, {}

    def lost(self, digest: Digest) -> None:
        """Forget the parts of an update that are lost on the disk."""
        self.kept.pop(digest, None)
        self.world.history.part_steps.append(PartStep(self.world.now, ClientId(""), digest, "is lost"))

    def begin(self, update: Update, index: int, *, is_bad: bool) -> bool | None:
        """Begin the stream of a part; return whether its bytes are wanted, None when the update is refused.

        Args:
            update: the update.
            index: the part's index.
            is_bad: the parts together do not cover the model.
        """
        gathering = self._gathering(update)
        is_wanted = gathering.begin(index)
        self._note(update, "begins" if is_wanted else "is here", index)
        if is_wanted:
            self._discard_older(update)
        return None if self._judge(update, gathering, is_bad=is_bad) else is_wanted

    def keep(self, update: Update, index: int) -> None:
        """Make a part durable."""
        self._note(update, "is kept", index)
        self.kept.setdefault(update.digest, set()).add(index)
        self._gathering(update).keep(index)

    def is_whole(self, update: Update, *, is_bad: bool) -> bool | None:
        """Return whether the update may be decided about; None when it is refused."""
        gathering = self._gathering(update)
        return None if self._judge(update, gathering, is_bad=is_bad) else gathering.is_whole

    def end(self, update: Update, index: int) -> None:
        """End the stream of a part; the last stream of an update ends what is known of it in memory."""
        if (gathering := self._gatherings.get(update.digest)) is not None:
            gathering.end(index)
            if not gathering.coming:
                del self._gatherings[update.digest]

    def _gathering(self, update: Update) -> Gathering[bool]:
        if update.digest not in self._gatherings:
            kept = set(self.kept.get(update.digest, ()))
            self._gatherings[update.digest] = Gathering(num_parts_of(update.digest), kept)
        return self._gatherings[update.digest]

    def _judge(self, update: Update, gathering: Gathering[bool], *, is_bad: bool) -> bool:
        if gathering.must_be_covered:
            self._note(update, "is judged bad" if is_bad else "is judged")
            gathering.covers = not is_bad
            gathering.verdict = True if is_bad else None
        return gathering.verdict is not None

    def _discard_older(self, update: Update) -> None:
        partial = self._partial.get(update.client_id, [])
        self._partial[update.client_id], older = newest_first(partial, update.digest, PARTIALS_MAX)
        for old in map(Digest, older):
            if old not in self._gatherings or old == update.digest:
                self.kept.pop(old, None)
                self._note(update, f"pushes out {old}")

    def _note(self, update: Update, what: str, index: int | None = None) -> None:
        self.world.history.part_steps.append(PartStep(self.world.now, update.client_id, update.digest, what, index))


class PartsServer(UploadServer, Protocol):
    """The coordinator that takes updates in parts."""

    parts: KeptParts

    def part_kept(self) -> bool:
        """Return whether the process dies just after it has made a part durable."""


class PartedUpload(Upload):
    """One attempt to upload an update in parts: a stream for each, in any order, and one verdict."""

    def __init__(
        self,
        world: World,
        agent: UploadAgent,
        coordinator: PartsServer,
        key: client.Key,
        update: Update,
        fault: RejectReason | None,
    ) -> None:
        self._server, self._num_parts = coordinator, num_parts_of(update.digest)
        self._open = set(range(self._num_parts))
        self._is_cut = self._must_resend = False
        super().__init__(world, agent, coordinator, key, update, fault)

    def _begin(self) -> None:
        """Open the streams, each after its own time."""
        self._server_life = self.coordinator.life
        for index in range(self._num_parts):
            self._after(self.world.latency(), index, self._begin_part)

    def _after(self, seconds: float, index: int, action: Callable[[int], None]) -> None:
        self.world.after(seconds, lambda: action(index))

    def cancel(self) -> None:
        """Cancel every stream."""
        super().cancel()
        self._end_all()

    def cut(self) -> None:
        """Break every stream, and notify the agent."""
        super().cut()
        self._end_all()

    def _end_all(self) -> None:
        if self.coordinator.is_up and self.coordinator.life == self._server_life:
            for index in self._open:
                self._server.parts.end(self.update, index)
        self._open = set()

    def _reaches(self, index: int) -> bool:
        """Return whether a stream goes on; its end is no end of the others."""
        if self.is_over or index not in self._open:
            return False
        server = self.coordinator
        if not (server.is_up and server.life == self._server_life and self.agent.is_online):
            self.cut()
            return False
        if not server.has_room() or self.world.happens("upload_cut", 0.5):
            self._is_cut = True
            self._end(index)
            return False
        return True

    def _end(self, index: int) -> None:
        """End one stream without a verdict; the end of the last one is the end of the attempt."""
        self._open.discard(index)
        self._server.parts.end(self.update, index)
        if self._open or self.is_over:
            return
        if self._must_resend and not self._is_cut:
            self._answer(client.Answered(self.key, False, RejectReason.DIGEST_MISMATCH, resend=True))
        else:
            self.cut()

    @property
    def _is_bad(self) -> bool:
        return self.fault is TOGETHER

    def _begin_part(self, index: int) -> None:
        if not self._reaches(index):
            return
        machine = self.coordinator.running
        if self.fault in IN_THE_MANIFEST and not self._is_bad:
            self._refuse(self.fault)
        elif (refusal := machine.refusal(self.update)) is not None:
            self._answer(client.Answered(self.key, False, *refusal))
        elif machine.is_accepted(self.update) or machine.is_hopeless(self.update):
            self.coordinator.update_arrived(self.update, self._judged)
        elif (is_wanted := self._server.parts.begin(self.update, index, is_bad=self._is_bad)) is None:
            self._refuse(TOGETHER)
        elif is_wanted:
            self.coordinator.upload_begun(self.update)
            seconds = self.world.rng.uniform(0.5, 1.5) * self.world.scenario.upload / self._num_parts
            done, broken = partial(self._part_transferred, index), partial(self._reaches, index)
            transfer(self.world, self.agent, self.coordinator, seconds, done, broken)
        else:
            self._decide(index)

    def _part_transferred(self, index: int) -> None:
        if not self._reaches(index):
            return
        if self.world.happens("upload_damaged", 0.5):
            self._must_resend = True
            self._end(index)
        elif self.fault is not None and not self._is_bad:
            self._refuse(self.fault)
        else:
            self._server.parts.keep(self.update, index)
            if not self._server.part_kept():
                self._decide(index)

    def _decide(self, index: int) -> None:
        match self._server.parts.is_whole(self.update, is_bad=self._is_bad):
            case None:
                self._refuse(TOGETHER)
            case True:
                self.coordinator.update_arrived(self.update, self._judged)
            case False:
                self._end(index)


# ---------------------------------------------------------------- checks


def faults_of_parts(history: History) -> Iterator[str]:
    """Yield the faults of a history's updates in parts."""
    kept: dict[Digest, set[int]] = defaultdict(set)
    began: dict[ClientId, list[Digest]] = defaultdict(list)  # the newest last
    judged: set[Digest] = set()
    for step in history.part_steps:
        yield from _faults_of(step, kept[step.digest], began[step.client_id], judged)
        if step.what == "begins":
            began[step.client_id] = [*(d for d in began[step.client_id] if d != step.digest), step.digest]
        elif step.what == "is kept" and step.index is not None:
            kept[step.digest].add(step.index)
        elif step.what == "is judged":
            judged.add(step.digest)
        elif step.what.startswith("pushes out "):
            kept.pop(Digest(step.what.removeprefix("pushes out ")), None)
        elif step.what == "is lost":
            kept.pop(step.digest, None)
    yield from _accepted(history)


def _faults_of(step: PartStep, kept: set[int], began: list[Digest], judged: set[Digest]) -> Iterator[str]:
    which = f"at {step.at:.3f}, part {step.index} of {step.digest}"
    if step.what == "begins" and step.index in kept:
        yield f"{which}: its bytes are wanted again, and it is kept"
    if step.what == "is here" and step.index not in kept:
        yield f"{which}: its bytes are not wanted, and it is not kept"
    if step.what == "is kept" and len(kept | {step.index}) == num_parts_of(step.digest) and step.digest not in judged:
        yield f"{which}: the last part was taken before all were judged together"
    if step.what.startswith("pushes out "):
        pushed = Digest(step.what.removeprefix("pushes out "))
        newest = [*(d for d in began if d != step.digest), step.digest][-PARTIALS_MAX:]
        if pushed in newest:
            yield f"at {step.at:.3f}, {step.digest} pushes out {pushed}, which is among the newest {newest}"


def _accepted(history: History) -> Iterator[str]:
    """Check that each accepted update in parts was whole and judged when it was accepted."""
    when: dict[tuple[Digest, int | None], float] = {}
    for part in history.part_steps:
        if part.what in ("is kept", "is judged"):
            when.setdefault((part.digest, part.index), part.at)
    for step, effect in history.effects():
        if not isinstance(effect, Accept) or not (num_parts := num_parts_of(effect.digest)):
            continue
        for index in (None, *range(num_parts)):
            if (effect.digest, index) not in when or when[effect.digest, index] > step.when:
                what = "all parts were judged together" if index is None else f"part {index} was kept"
                yield f"{effect.digest} was accepted at {step.when:.3f}, before {what}"
