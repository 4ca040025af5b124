"""A coordinator that lies at every step, with colluding members: what they learn of others, by linear algebra.

They keep every masked update, every share that a colluder got or a member has revealed, and all keys of colluders. An
update is an unknown, and so is each stream whose key they cannot compute; each masked update is an equation. What they
learn is every combination of updates in the span of the equations without an unknown stream.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import combinations

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from atoll.client.secure.member import Mask, Member, Send
from atoll.protocol.secure.boxes import Shares, seal, unseal
from atoll.protocol.secure.keys import box_key, mask_key, self_key
from atoll.protocol.secure.messages import (
    Agreement,
    Boxes,
    MemberKeys,
    Opening,
    Reveal,
    Roster,
    SealedShares,
    Survivors,
    survivors_statement,
)
from atoll.protocol.secure.session_size import MEMBERS_MIN
from atoll.protocol.secure.shamir import combined, weights
from atoll.protocol.secure.site_key import is_signed
from atoll.protocol.secure.transcript import session_id
from tests.server.sessions.small_federation import Site, sites_of, terms_of

FIELD = 2**61 - 1
Row = list[int]


@dataclass
class Equation:
    """A masked update: its owner, and the sign of each stream that was added."""

    owner: str
    streams: dict[bytes, int]


@dataclass
class Knowledge:
    """What the coordinator and the colluders know."""

    equations: list[Equation] = field(default_factory=list)
    known: set[bytes] = field(default_factory=set)  # keys of streams
    shares: dict[tuple[object, str, str], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    least: int = 100  # fewest honest members whose updates a combination may have


class Told:
    """An honest member in one attempt, and what it was told."""

    def __init__(self, site: Site, member: Member, keys: MemberKeys) -> None:
        self.site, self.member, self.keys = site, member, keys
        self.seed, self.mask = member._secrets.seed, member._secrets.mask
        self.roster: Roster | None = None
        self.sealed: SealedShares | None = None
        self.masking: frozenset[int] = frozenset()
        self.survivors: frozenset[int] = frozenset()
        self.signature: bytes | None = None

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.roster.members]

    @property
    def place(self) -> int:
        return self.names.index(self.site.name)

    def ask(self, question):
        """Ask, keep promises, and return the other effects."""
        effects = self.member.ask(question)
        for effect in effects:
            if hasattr(effect, "promise"):
                self.site.keep(effect.promise)
        return [effect for effect in effects if isinstance(effect, Send | Mask)]


class LyingServer:
    """A coordinator with `colluders` of `count` members; `draw` decides every lie."""

    believed: int | None = None
    """Colluders of which the honest members' policies know; None: as many as there are."""

    def __init__(self, seed: int, *, attempts: int = 4) -> None:
        self.draw = random.Random(f"liar {seed}")
        count = self.draw.randint(3, 7)
        self.colluders = self.draw.randint(0, min(2, count - 2))
        self.sites = sites_of(count, colluders_max=self.colluders if self.believed is None else self.believed)
        self.bad = {site.name for site in self.sites[: self.colluders]}
        self.threshold = self.threshold_rule()
        self.num_attempts, self.learned = attempts, Knowledge()

    def threshold_rule(self) -> str:
        """Draw the rule of the threshold."""
        return self.draw.choice(["two_thirds", "two_thirds", str(self.draw.randint(2, len(self.sites)))])

    @property
    def honest(self) -> list[str]:
        return [site.name for site in self.sites if site.name not in self.bad]

    def run(self) -> Knowledge:
        """Play all attempts at one round's sum."""
        for attempt in range(1, self.draw.randint(1, self.num_attempts) + 1):
            self._attempt(terms_of(attempt=attempt, threshold=self.threshold))
        return self.learned

    # ------------------------------------------------------------ one attempt

    def _attempt(self, terms) -> None:
        keys, private, told = {}, {}, {}
        for site in self.sites:
            member = site.member(terms)
            effects = member.start()
            sent = next(effect.message for effect in effects if isinstance(effect, Send))
            if not isinstance(sent, MemberKeys):
                continue
            keys[site.name] = sent
            if site.name in self.bad:
                private[site.name] = member._secrets
                continue
            site.keep(effects[0].promise)
            told[site.name] = Told(site, member, sent)
        rosters = [self._roster(terms, keys) for _ in range(self.draw.choice([1, 1, 1, 2]))]
        for each in told.values():
            each.roster = self.draw.choice(rosters)
            if each.site.name in each.names:
                answers = [effect.message for effect in each.ask(each.roster)]
                each.sealed = answers[0] if answers and isinstance(answers[0], SealedShares) else None
        there = [each for each in told.values() if each.sealed is not None]
        if self.draw.random() < 0.1:
            return
        self._mask(terms, there, private)
        if self.draw.random() < 0.25:
            return
        self._agree(terms, there)
        self._open(terms, there)

    def _roster(self, terms, keys) -> Roster:
        most = min(len(keys), terms.members_max)
        size = self.draw.choice([most, most, self.draw.randint(min(MEMBERS_MIN, most), most)])
        names = sorted(self.draw.sample(sorted(keys), size))
        return Roster(terms.threshold_of(size), tuple(keys[name] for name in names))

    def _session(self, terms, roster: Roster) -> bytes:
        return session_id(terms.digest, roster.threshold, [(e.statement(), e.signature) for e in roster.members])

    def _mask(self, terms, there: list[Told], private) -> None:
        """Forward boxes, those of some members to each; take the colluders' shares, and all masked updates."""
        common: dict[bytes, set[str]] = {}
        for each in there:
            roster, session = each.roster, self._session(terms, each.roster)
            peers = {other.site.name: other for other in there if other.roster == roster and other is not each}
            possible = [name for name in each.names if name in peers or name in private]
            some = common.setdefault(session, {name for name in each.names if self.draw.random() < 0.9})
            lied = {name for name in possible if self.draw.random() < 0.8}
            senders = [n for n in possible if n in (lied if self.draw.random() < 0.15 else some)]
            boxes = {}
            for name in senders:
                place = each.names.index(name)
                if name in peers:
                    boxes[place] = peers[name].sealed.boxes[each.place]
                else:
                    boxes[place] = self._sealed_by_colluder(private[name], each, session, place)
            for name in set(each.names) & private.keys():
                self._open_box(private[name], each, session, each.names.index(name))
            found = each.ask(Boxes(boxes))
            if found and isinstance(found[0], Mask):
                each.masking = frozenset({*boxes, each.place})
                streams = found[0].streams
                self.learned.equations.append(Equation(each.site.name, {stream.key: stream.sign for stream in streams}))
                for stream, place in zip(streams[1:], sorted(boxes), strict=True):
                    if each.names[place] in private:
                        self.learned.known.add(stream.key)

    @staticmethod
    def _exchange(secrets, each: Told) -> bytes:
        return secrets.box.exchange(X25519PublicKey.from_public_bytes(each.keys.box_key))

    def _sealed_by_colluder(self, secrets, each: Told, session: bytes, place: int) -> bytes:
        key = box_key(self._exchange(secrets, each), session, place, each.place)
        return seal(key, Shares(self.draw.randrange(2**256), 1), session, place, each.place)

    def _open_box(self, secrets, each: Told, session: bytes, place: int) -> None:
        key = box_key(self._exchange(secrets, each), session, each.place, place)
        shares = unseal(key, each.sealed.boxes[place], session, each.place, place)
        self.learned.shares[each.member, each.site.name, "seed"][place + 1] = shares.seed
        self.learned.shares[each.member, each.site.name, "key"][place + 1] = shares.key

    def _agree(self, terms, there: list[Told]) -> None:
        """Show members survivors, some of them others than the rest."""
        sets: dict[bytes, list[frozenset[int]]] = {}
        for each in there:
            if not each.masking:
                continue
            session = self._session(terms, each.roster)
            choices = sets.setdefault(
                session,
                [
                    frozenset(p for p in each.masking if self.draw.random() < self.draw.choice([1.0, 0.8]))
                    for _ in range(self.draw.choice([1, 2]))
                ],
            )
            survivors = self.draw.choice(choices)
            found = [effect.message for effect in each.ask(Survivors(survivors))]
            if found and isinstance(found[0], Agreement):
                each.survivors, each.signature = survivors, found[0].signature
                least = max(each.roster.threshold, self.sites[0].rules.min_others + 1)
                self.learned.least = min(self.learned.least, least - self.colluders)

    def _open(self, terms, there: list[Told]) -> None:
        """Show each member all signatures over its survivors, the colluders' among them, and take its shares."""
        for each in (each for each in there if each.signature is not None):
            session = self._session(terms, each.roster)
            statement = survivors_statement(session, each.survivors, len(each.roster.members))
            signatures = {
                other.place: other.signature
                for other in there
                if other.roster == each.roster
                and other.signature is not None
                and is_signed(other.keys.site.key, statement, other.signature)
            }
            for site in self.sites[: self.colluders]:
                if site.name in each.names and each.names.index(site.name) in each.survivors:
                    signatures[each.names.index(site.name)] = site.key.sign(statement)
            found = [effect.message for effect in each.ask(Opening(signatures))]
            if not (found and isinstance(found[0], Reveal)):
                continue
            owners = {other.site.name: other for other in there if other.roster == each.roster}
            for place, share in zip(sorted(each.masking), found[0].shares, strict=True):
                owner = owners.get(each.names[place])
                if owner is not None:
                    kind = "seed" if place in each.survivors else "key"
                    self.learned.shares[owner.member, owner.site.name, kind][each.place + 1] = share
        self._reconstruct(terms, there)

    def _reconstruct(self, terms, there: list[Told]) -> None:
        """Compute the keys of which there are enough shares."""
        for each in there:
            threshold = each.roster.threshold
            for kind, secret in (("seed", each.seed), ("key", each.mask.private_bytes_raw())):
                shares = self.learned.shares[each.member, each.site.name, kind]
                if len(shares) < threshold:
                    continue
                some = sorted(shares)[:threshold]
                assert combined(weights(some), [shares[place] for place in some]) == secret
                self._learn_keys(terms, each, kind, secret)

    def _learn_keys(self, terms, each: Told, kind: str, secret: bytes) -> None:
        session = self._session(terms, each.roster)
        if kind == "seed":
            self.learned.known.add(self_key(secret, session))
            return
        private = X25519PrivateKey.from_private_bytes(secret)
        for place, other in enumerate(each.roster.members):
            if place != each.place:
                shared = private.exchange(X25519PublicKey.from_public_bytes(other.mask_key))
                self.learned.known.add(mask_key(shared, session, each.place, place))


# ---------------------------------------------------------------- linear algebra modulo a prime


def learned_span(knowledge: Knowledge, names: list[str]) -> list[Row]:
    """Return a basis of the combinations of these updates that the liars can compute."""
    unknown = sorted({key for each in knowledge.equations for key in each.streams} - knowledge.known)
    rows = [
        [each.streams.get(key, 0) for key in unknown] + [int(each.owner == name) for name in names]
        for each in knowledge.equations
    ]
    return [row[len(unknown) :] for row in reduced(rows, len(unknown)) if not any(row[: len(unknown)])]


def reduced(rows: list[Row], columns: int) -> list[Row]:
    """Return rows with the same span of which only the first have values in the first columns (Gauss)."""
    rows, done = [[value % FIELD for value in row] for row in rows], 0
    for column in range(columns):
        pivot = next((at for at in range(done, len(rows)) if rows[at][column]), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        inverse = pow(rows[done][column], -1, FIELD)
        for at in range(done + 1, len(rows)):
            if factor := rows[at][column] * inverse % FIELD:
                rows[at] = [(a - factor * b) % FIELD for a, b in zip(rows[at], rows[done], strict=True)]
        done += 1
    return rows


def rank(rows: list[Row]) -> int:
    """Return the dimension of a span."""
    return sum(any(row) for row in reduced(rows, len(rows[0]))) if rows else 0


def smallest(basis: list[Row], size: int) -> int:
    """Return the fewest updates in a combination of the span that is not zero; 0: there is none.

    There is one of the updates in T alone if the span loses dimensions when the others' columns are all that is left.
    """
    dimension = rank(basis)
    if not dimension:
        return 0
    for number in range(1, size + 1):
        for chosen in combinations(range(size), number):
            others = [[row[at] for at in range(size) if at not in chosen] for row in basis]
            if number == size or rank(others) < dimension:
                return number
    raise AssertionError("a span that is not zero has an element")
