"""A run of secure rounds in memory: its machine with journaled events, sites with members, and faults."""

import hashlib
import random
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.client.secure.member import KeepPromise, Mask, Member, Send
from atoll.client.work.noise_share import share_of
from atoll.protocol.secure import wire
from atoll.protocol.secure.messages import Agreement, Gone, MemberKeys, Reveal, SealedShares
from atoll.protocol.vocabulary import FailureReason, Fate, LossReason, RoundId, RunState, Version
from atoll.server.journal.codec import decode_event, encode_event
from atoll.server.opening.streams import NotOpened, open_sum
from atoll.server.rounds import events as ev
from atoll.server.rounds import session_events as of_sessions
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.secure_rules import SecureRules
from atoll.tensors.secure.keystream import add_stream
from tests.server.sessions.small_federation import SIZE, masked_in_parts, privacy_of, sites_of, terms_of

KIND = {
    SealedShares: of_sessions.SharesCame,
    Agreement: of_sessions.SurvivorsSigned,
    Reveal: of_sessions.SharesRevealed,
}


@dataclass
class Work:
    """What a site has for a round: its encoded update, and the member of the newest attempt."""

    encoded: np.ndarray
    members: dict[tuple[int, int], Member] = field(default_factory=dict)  # by session and attempt
    lost: set[tuple[int, int]] = field(default_factory=set)  # whose secrets a crash has taken
    masked: dict[str, np.ndarray] = field(default_factory=dict)  # by digest
    pending: tuple[str, int] | None = None  # digest to upload, attempt


class SecureRun:
    """A run and its sites; messages in any order, twice or never.

    Args:
        count: sites.
        draw: decides the order of everything.
        faults: probability of a fault at each step.
        meshes: share of the sites whose updates are masked in parts, each by a rank.
        privacy: rules of differential privacy; None: there is none.
    """

    def __init__(
        self, count, draw: random.Random, *, faults=0.0, rounds=2, quorum=1, meshes=0.0, privacy=None, **secure
    ):
        policy = StragglerPolicy(cohort_size=count, quorum=quorum, deadline=100.0, linger=5.0)
        self.rules = RunRules(policy, rounds, secure=SecureRules(**{"clip_norm": 1.0, **secure}), privacy=privacy)
        self.noise: dict[str, np.ndarray] = {}  # that a site has added, by the digest of the masked update
        self.sites = {site.name: site for site in sites_of(count)}
        self.draw, self.faults = draw, faults
        self.work: dict[tuple[str, int], Work] = {}
        self.machine, self.journal, self.now = RunMachine(self.rules), [], 0.0
        self.queue, self.connected, self.number = [], set(), 0
        self.accepted: dict[str, np.ndarray] = {}  # masked updates that are durable at the coordinator
        self.opened, self.committed, self.pads = [], [], {}
        self.cuts = {
            name: sorted(draw.sample(range(1, SIZE), draw.randint(1, 4))) if draw.random() < meshes else []
            for name in self.sites
        }
        self.num_crashes = self.num_attempts = 0
        self.reasons = []
        self.refused = []  # reasons for which masked updates were refused

    # ------------------------------------------------------------ the coordinator

    def post(self, event):
        """Journal an event, and carry out its effects."""
        kind, body = encode_event(event)
        event = decode_event(kind, body, where="")
        self.now += 0.01
        self.journal.append((self.now, kind, body))
        for effect in self.machine.receive(event, self.now):
            self.carry_out(effect)

    def carry_out(self, effect):
        match effect:
            case ev.DrawCohort(round_id, count, candidates):
                chosen = tuple(c.client_id for c in candidates[:count])
                self.queue.append(lambda: self.post(ev.CohortDrawn(round_id, chosen)))
            case ev.Invite() | of_sessions.TellMember() | ev.Release():
                self.send(effect)
            case of_sessions.OpenSum(round_id, summed):
                self.queue.append(lambda: self.open(round_id, summed))
            case ev.Aggregate():
                self.queue.append(lambda: self.aggregate(effect))
            case ev.OpenNextRound():
                self.queue.append(lambda: self.post(ev.RoundDue()))
            case ev.Reject(reason=reason):
                self.refused.append(reason)
            case ev.Commit(round_id):
                self.committed.append(round_id)
                self.forget_reveals()
            case _:
                pass

    def forget_reveals(self):
        """Delete what opened the sums, as the journal does at the end of a round."""
        for place, (at, kind, body) in enumerate(self.journal):
            if kind == "SharesRevealed":
                without = replace(decode_event(kind, body, where=""), content="")
                self.journal[place] = (at, *encode_event(without))

    def send(self, effect):
        if effect.client_id in self.connected:
            self.queue.append(lambda: self.at_site(effect))
            if self.draw.random() < self.faults:
                self.queue.append(lambda: self.at_site(effect))

    def streams_of(self, summed):
        opened = open_sum(summed.roster, summed.id, summed.masking, summed.survivors, summed.reveals)
        return opened.streams, [summed.roster.members[position].name for position in opened.wrong]

    def open(self, round_id, summed):
        try:
            _, wrong = self.streams_of(summed)
        except NotOpened as error:
            self.post(of_sessions.OpeningFailed(round_id, summed.session, summed.attempt, str(error)))
            return
        self.post(of_sessions.SumOpened(round_id, summed.session, summed.attempt, tuple(wrong)))

    def aggregate(self, effect):
        """Open each sum, and check that it is exact."""
        digests = {c.client_id: c.digest for c in effect.contributions}
        for summed in effect.sums:
            total = np.zeros(SIZE, np.uint32)
            for name in summed.members:
                total += self.accepted[digests[name]]
            for stream in self.streams_of(summed)[0]:
                add_stream(total, stream.key, stream.sign)
            expected = np.zeros(SIZE, np.uint32)
            for name in summed.members:
                expected += self.work[name, effect.round_id].encoded + self.noise[digests[name]]
            assert np.array_equal(total, expected)
            assert len(summed.members) >= summed.roster.threshold
            self.opened.append((effect.round_id, summed.session, summed.members))
        assert sorted(digests) == sorted(name for summed in effect.sums for name in summed.members)
        self.post(ev.Aggregated(effect.round_id, f"model-{effect.base_version + 1}", {}, (0,)))

    def crash(self):
        """Restart the coordinator: the journal is all that is left."""
        self.num_crashes += 1
        machine = RunMachine(self.rules)
        for at, kind, body in self.journal:
            machine.receive(decode_event(kind, body, where=""), at)
        assert machine.ledger == self.machine.ledger
        assert (machine.round is None) == (self.machine.round is None)
        if machine.round is not None:
            assert machine.round.record == self.machine.round.record
        self.machine, self.queue, was = machine, [], self.connected
        self.connected = set()
        self.post(ev.CoordinatorStarted(self.now, 0.0))
        for name in sorted(was):
            self.join(name)

    # ------------------------------------------------------------ the sites

    def join(self, name):
        """Connect a site; what it still has to upload is uploaded again."""
        self.connected.add(name)
        self.number += 1
        mine = tuple(RoundId(number) for site, number in self.work if site == name)
        self.post(ev.ClientJoined(name, f"s{self.number}", working_on=mine))
        for (site, number), work in self.work.items():
            if site == name and work.pending is not None:
                self.queue.append(lambda number=number: self.upload(name, number))

    def at_site(self, effect):
        name, number = effect.client_id, int(effect.round_id)
        if name not in self.connected:
            return
        if self.draw.random() < self.faults:
            self.fail(name)
            return
        match effect:
            case ev.Invite(sum=place):
                self.invited(name, number, effect.base_version, place)
            case of_sessions.TellMember(session=session, attempt=attempt, members=members, question=question):
                work = self.work.get((name, number))
                member = work.members.get((session, attempt)) if work is not None else None
                if member is None:
                    self.gone(name, number, session, attempt, Gone("session_lost: it was restarted"))
                    return
                of = wire.SessionName("digits-1", number, attempt, session)
                message = wire.question_message(of, question, members)
                self.effects(name, number, session, attempt, member.ask(wire.question_of(message, members)))
            case ev.Release():
                self.work.pop((name, number), None)

    def invited(self, name, number, base, place):
        site, key = self.sites[name], (place.session, place.attempt)
        work = self.work.get((name, number))
        if work is None:
            seed = int.from_bytes(hashlib.sha256(f"{name} {number}".encode()).digest()[:8])
            encoded = np.random.default_rng(seed).integers(0, 2**32, SIZE, np.uint32)
            work = self.work[name, number] = Work(encoded)
        if key in work.lost:
            self.gone(name, number, *key, Gone("session_lost: it was restarted"))
            return
        if (member := work.members.get(key)) is None:
            model = hashlib.sha256(f"model {base}".encode()).hexdigest()
            terms = terms_of(
                **{"round": number, "attempt": place.attempt, "session": place.session, "base": base, "model": model},
                threshold=self.rules.secure.threshold,
                privacy=self.privacy,
            )
            member = work.members[key] = site.member(terms)
            self.num_attempts += place.attempt > 1
        self.effects(name, number, *key, member.start())

    def effects(self, name, number, session, attempt, effects):
        site, work = self.sites[name], self.work[name, number]
        for effect in effects:
            match effect:
                case KeepPromise(promise):
                    site.keep(promise)
                case Send(message):
                    self.say(name, number, session, attempt, message)
                case Mask(streams, of_session):
                    noise = self.share_of(name, work.members[session, attempt].terms, of_session)
                    masked = masked_in_parts(work.encoded + noise, streams, self.cuts[name])
                    for stream in streams:
                        pad = (stream.key, name)
                        assert self.pads.setdefault(pad, (number, session, attempt)) == (number, session, attempt)
                    digest = hashlib.sha256(masked.tobytes()).hexdigest()
                    work.masked[digest], work.pending, self.noise[digest] = masked, (digest, attempt), noise
                    self.queue.append(lambda: self.upload(name, number))

    @property
    def privacy(self):
        """The privacy in the terms of each sum."""
        if (rules := self.rules.privacy) is None:
            return ""
        of_noise = {"noise_by": rules.noise_by, "noise_multiplier": rules.noise_multiplier}
        members = (rules.honest_min, rules.colluders) if rules.noise_by == "clients" else (0, 0)
        return privacy_of(*members, **of_noise).text()

    def share_of(self, name, terms, session):
        """Return the noise that a site adds in an attempt, from its secret."""
        share = share_of(hashlib.sha256(name.encode()).digest(), terms, session)
        noise = np.zeros(SIZE, np.int64) if share is None else share.between("w", SIZE, 0, SIZE)
        return noise.astype(np.uint32)

    def say(self, name, number, session, attempt, message):
        if isinstance(message, Gone):
            self.gone(name, number, session, attempt, message)
            return
        of = wire.SessionName("digits-1", number, attempt, session)
        content = wire.encoded(wire.answer_message(of, message)).hex()
        kind = of_sessions.KeysCame if isinstance(message, MemberKeys) else KIND[type(message)]
        event = kind(name, RoundId(number), session, attempt, content)
        for _ in range(1 + (self.draw.random() < self.faults)):
            self.queue.append(lambda: self.heard(name, event))

    def heard(self, name, event):
        round_ = self.machine.round
        is_its_round = round_ is not None and round_.record.round_id == event.round_id
        if name in self.connected and is_its_round and round_.is_news_of(event):
            self.post(event)

    def gone(self, name, number, session, attempt, gone):
        reason, _, detail = gone.reason.partition(": ")
        known = FailureReason(reason) if reason in set(FailureReason) else FailureReason.SESSION_REFUSED
        detail = detail if reason == known else gone.reason
        self.reasons.append(gone.reason)
        event = of_sessions.SessionLeft(name, RoundId(number), session, attempt, known, detail, gone.refused)
        self.queue.append(lambda: self.heard(name, event))

    def upload(self, name, number):
        work = self.work.get((name, number))
        if work is None or work.pending is None or name not in self.connected:
            return
        digest, attempt = work.pending
        update = ev.Update(name, RoundId(number), self.base_of(number), digest, 1, 1.0, 4 * SIZE, attempt=attempt)
        self.accepted.setdefault(digest, work.masked[digest])
        before = len(self.journal)
        self.post(ev.UpdateReceived(update))
        assert len(self.journal) > before
        work.pending = None

    def base_of(self, number):
        record = self.machine.record_of(RoundId(number))
        return record.base_version if record is not None else Version(0)

    def fail(self, name):
        """End a site's process, or its connection; the process starts again without the secrets."""
        self.connected.discard(name)
        is_killed = self.draw.random() < 0.5
        for (site, _), work in self.work.items():
            if site == name and is_killed:
                work.lost |= work.members.keys()
                work.members.clear()
        self.post(ev.ClientDisconnected(name, f"s{self.number}"))
        if self.draw.random() < 0.2:
            self.post(ev.ClientLost(name, LossReason.LEASE_EXPIRED, silent_for=1.0))
        if self.draw.random() < 0.9:
            self.queue.append(lambda: self.join(name) if name not in self.connected else None)

    # ------------------------------------------------------------ the whole

    def run(self, steps=4000):
        """Run to the end, and return whether the run has finished."""
        self.post(ev.RunStarted("model-0"))
        for name in self.sites:
            self.join(name)
        for _ in range(steps):
            if self.machine.ledger.state not in (RunState.QUEUED, RunState.RUNNING):
                return self.machine.ledger.state is RunState.FINISHED
            if self.queue:
                self.queue.pop(self.draw.randrange(len(self.queue)))()
                if self.draw.random() < self.faults / 4:
                    self.crash()
                continue
            deadline = self.machine.deadline
            if deadline is None:
                for name in self.sites.keys() - self.connected:
                    self.join(name)
                if not self.queue:
                    raise AssertionError("the run awaits nothing")
                continue
            self.now = max(self.now, deadline)
            self.post(ev.TimePassed())
        raise AssertionError("the run does not end")


def fates(record):
    """Return the fate of each client of a round."""
    return {client_id: row.fate for client_id, row in record.clients.items()}


def is_reported(record):
    """Return whether every client of a round has reported."""
    return {*fates(record).values()} == {Fate.REPORTED}
