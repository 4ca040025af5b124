"""A secure sum of a few members and a coordinator in memory: messages in any order, late, twice or never."""

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.secure.member import KeepPromise, Mask, Member, MemberRules, Send
from atoll.client.secure.promises import PeerChains, Promises
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure.messages import Gone, MemberKeys, Roster, SiteIdentity
from atoll.protocol.secure.privacy_terms import PrivacyTerms
from atoll.protocol.secure.terms import Terms
from atoll.server.opening.streams import NotOpened, open_sum
from atoll.server.sessions.session import Fail, OpenSum, Session, Tell
from atoll.tensors.secure.keystream import Streams, add_stream

SIZE = 37
DIGEST = "ab" * 32


def terms_of(**changes) -> Terms:
    """Return the terms of an update's sum, with some other values."""
    values = {
        **{"run": "digits-1", "round": 1, "attempt": 1, "session": 0, "purpose": "update", "base": 0},
        **{"model": DIGEST, "frozen": "", "task": "digits", "algorithm": "fedavg", "local": "{}", "layout": DIGEST},
        **{"bits": 32, "clip_norm": 1.0, "examples_max": 1000, "ranges": DIGEST, "members_max": 64},
        **{"threshold": "two_thirds", "privacy": "", "receivers": ()},
    }
    return Terms(**{**values, **changes})


def privacy_of(honest_min=3, colluders=1, **changes) -> PrivacyTerms:
    """Return the privacy of a sum to which its members add noise."""
    values = {
        **{"unit": "client", "noise_by": "clients", "epsilon": 8.0, "delta": 1e-6, "noise_multiplier": 1.5},
        **{"participations_max": 10, "divisor": 5, "honest_min": honest_min, "colluders": colluders},
    }
    return PrivacyTerms(**{**values, **changes})


@dataclass
class Site:
    """A site with its long-lived state: key, promises, and the peers that it has pinned."""

    name: str
    rules: MemberRules = field(default_factory=lambda: MemberRules(min_others=2, colluders_max=0))
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    promises: Promises = field(default_factory=lambda: Promises(base_repeats_max=2))
    peers: PeerChains = field(default_factory=PeerChains)
    pinned: dict[str, bytes] = field(default_factory=dict)
    written: list = field(default_factory=list)

    @property
    def identity(self) -> SiteIdentity:
        return SiteIdentity(self.key.public_key().public_bytes_raw(), b"certificate", b"certification")

    def trust(self, keys: MemberKeys) -> None:
        if self.pinned.get(keys.name) != keys.site.key:
            raise NotTrusted(f"the key of {keys.name} is not pinned")

    def member(self, terms: Terms) -> Member:
        state = {"promises": self.promises, "peers": self.peers, "trust": self.trust}
        return Member(self.name, terms, self.rules, key=self.key, site=self.identity, **state)

    def keep(self, promise) -> None:
        """Make a promise durable; giving it again changes nothing."""
        if promise not in self.written:
            self.written.append(promise)
            self.promises.add(promise)


def sites_of(count: int, **rules) -> list[Site]:
    """Return sites that have pinned each other, sorted by name."""
    sites = [
        Site(f"site-{number:02d}", MemberRules(**{"min_others": 2, "colluders_max": 0, **rules}))
        for number in range(count)
    ]
    keys = {site.name: site.identity.key for site in sites}
    for site in sites:
        site.pinned.update(keys)
    return sites


def masked_in_parts(encoded, streams, cuts=()):
    """Return a masked update; each rank of a mesh masks the words between two cuts, and one that dies masks again."""
    masked, ends = encoded.copy(), [0, *cuts, encoded.size]
    keys = [(stream.key, stream.sign) for stream in streams]
    for begin, end in reversed([*pairwise(ends)]):
        again = encoded[begin:end].copy()
        for part in (masked[begin:end], again):
            Streams(keys).add(part, begin)
        assert np.array_equal(masked[begin:end], again)
    return masked


class SmallFederation:
    """One attempt of a session.

    Args:
        sites: sorted by name.
        vectors: encoded update of each.
        terms: of the attempt.
        draw: decides the order of all messages, and which are repeated.
        ends: the number of messages after which a member ends, by name.
        cuts: where the vector of a mesh is divided between its ranks, by name.
    """

    def __init__(self, sites, vectors, terms, draw: random.Random, ends=None, cuts=None):
        self.sites, self.vectors, self.terms, self.draw, self.cuts = sites, vectors, terms, draw, cuts or {}
        self.ends = dict(ends or {})
        self.members, self.masked, self.queue = {}, {}, []
        self.streams = []  # all key streams that were ever used as a pad, with the vector's owner
        self.session = self.outcome = None
        self.is_opening = False
        self.reasons = {}

    def run(self):
        """Return the sum and the survivors' names, or the Fail."""
        keys = {}
        for site in self.sites:
            member = site.member(self.terms)
            for message in self._effects(site, member.start()):
                if isinstance(message, MemberKeys):
                    keys[site.name], self.members[site.name] = message, member
                else:
                    self.reasons[site.name] = message.reason
        self.names = sorted(keys)
        if len(keys) < 3:
            return Fail("fewer than 3", True)
        roster = Roster(self.terms.threshold_of(len(keys)), tuple(keys[name] for name in self.names))
        self.session = Session(roster, self.terms.digest)
        self._carry_out(self.session.start())
        while self.outcome is None:
            if not self.queue:
                self._carry_out(self.session.due())
                continue
            at = self.draw.randrange(len(self.queue))
            if isinstance(self.queue[at], dict):
                self._open(self.queue.pop(at))
                continue
            self._deliver(*self.queue[at]) if self.draw.random() < 0.1 else self._deliver(*self.queue.pop(at))
        return self.outcome

    def _deliver(self, position, question):
        name = self.names[position]
        member = self.members.get(name)
        if member is None:
            return
        left = self.ends.get(name)
        if left is not None:
            self.ends[name] = left - 1
            if left <= 0:
                del self.members[name]
                self._carry_out(self.session.left(position, "session_lost"))
                return
        site = next(site for site in self.sites if site.name == name)
        for message in self._effects(site, member.ask(question)):
            if message is None:
                self._carry_out(self.session.masked(position))
            elif isinstance(message, Gone):
                self.reasons[name] = message.reason
                self._carry_out(self.session.left(position, message.reason))
            else:
                self._carry_out(self.session.answered(position, message))

    def _effects(self, site, effects):
        """Carry out a member's effects; return its messages, None for a masked update."""
        messages = []
        for effect in effects:
            match effect:
                case KeepPromise(promise=promise):
                    site.keep(promise)
                case Send(message=message):
                    messages.append(message)
                case Mask(streams=streams):
                    masked = masked_in_parts(self.vectors[site.name], streams, self.cuts.get(site.name, ()))
                    assert site.name not in self.masked or np.array_equal(self.masked[site.name], masked)
                    self.masked[site.name] = masked
                    messages.append(None)
        return messages

    def _carry_out(self, effects):
        for effect in effects:
            match effect:
                case Tell(position=position, question=question):
                    self.queue.append((position, question))
                case Fail():
                    self.outcome = effect
                case OpenSum(reveals=reveals):
                    assert not self.is_opening, "two openings of one sum at a time"
                    self.is_opening = True
                    self.queue.append(dict(reveals))  # it takes a while, and messages come meanwhile

    def _open(self, reveals):
        session, self.is_opening = self.session, False
        try:
            opened = open_sum(session.roster, session.id, session.masking, session.survivors, reveals)
        except NotOpened:
            self._carry_out(session.refused())
            return
        total = np.zeros_like(next(iter(self.vectors.values())))
        survivors = [self.names[position] for position in sorted(session.survivors)]
        for name in survivors:
            total += self.masked[name]
        for stream in opened.streams:
            add_stream(total, stream.key, stream.sign)
        session.opened(opened.wrong)
        self.outcome = total, survivors


def vectors_of(sites, draw: random.Random, dtype=np.uint32):
    """Return an encoded update for each site."""
    generator = np.random.default_rng(draw.randrange(2**32))
    return {site.name: generator.integers(0, np.iinfo(dtype).max, SIZE, dtype, endpoint=True) for site in sites}


def attempts(sites, vectors, draw: random.Random, *, ends=lambda attempt: {}, attempts_max=3, **terms):
    """Run attempts of one round until a sum is opened or none may follow; return the last one."""
    for attempt in range(1, attempts_max + 1):
        federation = SmallFederation(sites, vectors, terms_of(attempt=attempt, **terms), draw, ends(attempt))
        outcome = federation.run()
        if not isinstance(outcome, Fail) or not outcome.may_repeat:
            break
    return federation


def changed(keys: MemberKeys, **fields) -> MemberKeys:
    """Return a member's keys with other fields."""
    return replace(keys, **fields)
