"""A member's side of one session (Bonawitz et al. 2017, section 4.2, for an active server): questions in, effects out.

    start     -> JOINED is durable, then MemberKeys
    Roster    -> SealedShares            its checks: whom this site would be in a sum with, and how few may open it
    Boxes     -> Mask                    the masked update is made and uploaded as any other
    Survivors -> SIGNED is durable, then Agreement
    Opening   -> Reveal, and all secrets are dropped

A failed check ends the session at this site with a reason, never with a warning. A repeated question gets the same
bytes, and boxes after the reveal nothing; another question of the same kind, or one out of turn, ends the session. The
secrets exist in memory only and come from the operating system: a member that was killed says that it is gone, and its
masked update may still count.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum, auto
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from atoll.client.secure.promises import Kind, PeerChains, Promise, Promises, extended, promise_of, sites_digest
from atoll.ground.printable import count_of
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure.boxes import BadBox, Shares, seal, unseal
from atoll.protocol.secure.keys import box_key, exchanged, mask_key, self_key
from atoll.protocol.secure.messages import (
    Agreement,
    Answer,
    Boxes,
    Chain,
    Gone,
    MemberKeys,
    Opening,
    Position,
    Question,
    Reveal,
    Roster,
    SealedShares,
    SiteIdentity,
    Survivors,
    survivors_statement,
)
from atoll.protocol.secure.privacy_terms import read_privacy
from atoll.protocol.secure.session_size import MEMBERS_MIN
from atoll.protocol.secure.shamir import split
from atoll.protocol.secure.site_key import is_signed
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.transcript import commitment, digest, session_id
from atoll.protocol.value_type import value

SEED_BYTES = 32


@value
class MemberRules:
    """What a site's policy demands of a session.

    Attributes:
        min_others: fewest other members of a sum.
        colluders_max: members n_c that may work together with the coordinator: 2 t > n + n_c.
        setting: the policy's setting that demands this number of others, with its value; empty: `min_others`.
    """

    min_others: int = 3
    colluders_max: int = 1
    setting: str = ""

    @property
    def demand(self) -> str:
        """The setting with its value, for sentences."""
        return self.setting or f"min_others = {self.min_others}"


@value
class Stream:
    """A key stream that a member adds to its encoded update (`sign` 1) or subtracts from it (-1)."""

    key: bytes
    sign: int

    def __repr__(self) -> str:
        """Return the sign alone: keys are in no log and no traceback."""
        return f"Stream(sign={self.sign})"


@value
class KeepPromise:
    """Make a promise durable, before the effects behind it are carried out."""

    promise: Promise


@value
class Send:
    """Send a message of the session to the coordinator."""

    message: MemberKeys | Answer | Gone


@value
class Mask:
    """Mask the encoded update with these streams, and upload it.

    Attributes:
        streams: of this member.
        session: id of the session, for the key of this member's share of the noise.
    """

    streams: tuple[Stream, ...]
    session: bytes = b""


Effect = KeepPromise | Send | Mask
Trust = Callable[[MemberKeys], None]
"""Raises NotTrusted for keys of a peer that this site does not trust."""


class Stage(IntEnum):
    """The stage of a session: the newest question that was answered."""

    NEW = auto()
    KEYS = auto()
    SHARED = auto()
    MASKED = auto()
    AGREED = auto()
    REVEALED = auto()
    ENDED = auto()


class _Refused(Exception):
    """A failed check: the reason for which this member leaves, and the names of the members that it refuses."""

    def __init__(self, reason: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.names = names


class Member:
    """A member of one session.

    Args:
        name: of this client.
        terms: accepted by the policy.
        rules: of the site.
        key: the site's long-lived key.
        site: its public part, certified.
        promises: of the site, for all its sessions; this one reads the end of the chain and what is forbidden.
        peers: ends of the chains of peers that this site has seen.
        trust: check of a peer's keys.
    """

    def __init__(
        self,
        name: str,
        terms: Terms,
        rules: MemberRules,
        *,
        key: Ed25519PrivateKey,
        site: SiteIdentity,
        promises: Promises,
        peers: PeerChains,
        trust: Trust,
    ) -> None:
        self.name, self.terms, self.stage = name, terms, Stage.NEW
        self._privacy = read_privacy(terms.privacy)
        self._digest = terms.digest
        self._rules, self._key, self._site, self._trust = rules, key, site, trust
        self._promises, self._peers = promises, peers
        self._members: tuple[MemberKeys, ...] = ()
        self._keys: MemberKeys | None = None
        self._gone = Gone("")  # why this member has left
        self._answers: dict[type[Question], tuple[Question, tuple[Effect, ...]]] = {}
        self._secrets: _Secrets | None = None

    @property
    def num_members(self) -> int:
        """Number of members of the session; 0: not known before the roster."""
        return len(self._members)

    # ------------------------------------------------------------ questions

    def start(self) -> list[Effect]:
        """Join: return the promise, and the member's signed keys; a repeated start returns the same message alone."""
        if self.stage is Stage.ENDED:
            return [Send(self._gone)]
        if self._keys is not None:
            return [Send(self._keys)]
        if fault := self._promises.fault(self.terms):
            return self._leave(fault)
        promise = promise_of(Kind.JOINED, self.terms)
        self._secrets = made = _Secrets()
        self._keys = keys = self._signed_keys(made, extended(self._promises.chain, promise))
        self.stage = Stage.KEYS
        return [KeepPromise(promise), Send(keys)]

    def ask(self, question: Question) -> list[Effect]:
        """Answer a question of the coordinator, or leave."""
        if (known := self._answers.get(type(question))) is not None:
            if known[0] == question and self.stage is not Stage.ENDED:
                return [*known[1]]
            return self._leave(f"the coordinator has sent two different {type(question).__name__} in one session")
        before, check = {
            Roster: (Stage.KEYS, self._on_roster),
            Boxes: (Stage.SHARED, self._on_boxes),
            Survivors: (Stage.MASKED, self._on_survivors),
            Opening: (Stage.AGREED, self._on_opening),
        }[type(question)]
        if self.stage is not before:
            return self._leave(f"{type(question).__name__} in the stage {self.stage.name.lower()}")
        try:
            effects = check(question)  # type: ignore[operator]
        except _Refused as refusal:
            return self._leave(str(refusal), refusal.names)
        self.stage = Stage(self.stage + 1)
        self._answers[type(question)] = question, tuple(effects)
        return list(effects)

    def leave(self, reason: str) -> list[Effect]:
        """End the session at this site, for a reason of its shell: a released round, a policy that has changed."""
        return self._leave(reason)

    # ------------------------------------------------------------ checks

    def _on_roster(self, roster: Roster) -> list[Effect]:
        members = roster.members
        names = [member.name for member in members]
        _check(len({*names}) == len(names) and names == sorted(names), "the roster's names are not sorted and unique")
        _check(self._keys in members, "the roster does not have the keys that this site has sent")
        self._check_size(len(members), roster.threshold)
        for kind in ("mask_key", "box_key"):
            keys = {getattr(member, kind) for member in members}
            _check(len(keys) == len(members), f"two members of the roster have one {kind.replace('_', ' ')}")
        self._check_each((member, partial(self._check_member, member)) for member in members)
        for member in members:
            self._peers.remember(member.site.key, member.chain)
        self._members, self._threshold = members, roster.threshold
        self._place = names.index(self.name)
        signed = [(member.statement(), member.signature) for member in members]
        self._session = session_id(self._digest, roster.threshold, signed)
        return [Send(SealedShares(self._shared()))]

    def _check_size(self, members: int, threshold: int) -> None:
        rules, wanted = self._rules, self.terms.threshold_of(members)
        least = max(MEMBERS_MIN, rules.min_others + 1, self._noise_min)
        demanded = f"this site demands {least} ({rules.demand}{self._of_noise})"
        _check(members >= least, f"the roster has {count_of(members, 'member')}; {demanded}")
        _check(
            members <= self.terms.members_max,
            f"the roster has {count_of(members, 'member')}; the terms allow {self.terms.members_max}",
        )
        _check(threshold == wanted, f"threshold {threshold}; the terms give {wanted} for {count_of(members, 'member')}")
        _check(
            threshold <= members and 2 * threshold > members + rules.colluders_max,
            f"threshold {threshold} of {count_of(members, 'member')}; this site demands more than half of members and "
            f"{rules.colluders_max} colluders (colluders_max), and no more than there are",
        )

    def _check_each(self, checks: Iterable[tuple[MemberKeys, Callable[[], None]]]) -> None:
        """Check each member, and refuse all that fail by their names: an attempt without them may follow."""
        faults: dict[str, str] = {}
        for member, check in checks:
            try:
                check()
            except _Refused as refusal:
                faults[member.name] = str(refusal)
        if faults:
            first, *others = faults
            more = f" ({', '.join(others)} refused, too)" if others else ""
            raise _Refused(f"{faults[first]}{more}", tuple(faults))

    def _check_member(self, member: MemberKeys) -> None:
        _check(member.terms == self._digest, f"{member.name} has other terms")
        if member.name == self.name:
            return
        _check(
            is_signed(member.site.key, member.statement(), member.signature), f"the signature of {member.name} is wrong"
        )
        try:
            self._trust(member)
        except NotTrusted as fault:
            raise _Refused(str(fault)) from None
        is_fork = self._peers.is_fork(member.site.key, member.chain)
        if is_fork:
            self._peers.accuse(member.site.key, member.chain)
        _check(
            not is_fork,
            f"the promises of {member.name} are others than this site has seen: its state was put back to an older one",
        )

    def _shared(self) -> dict[Position, bytes]:
        """Make the masks' and boxes' keys, share the secrets, and return the boxes."""
        made, members, session, place = self._held(), self._members, self._session, self._place
        seeds = split(made.seed, self._threshold, len(members))
        keys = split(made.mask.private_bytes_raw(), self._threshold, len(members))
        made.shares[place] = Shares(seeds[place], keys[place])
        boxes = {}

        def share_with(other: Position) -> None:
            member = members[other]
            masked, boxed = exchanged(made.mask, member.mask_key), exchanged(made.box, member.box_key)
            _check(masked is not None and boxed is not None, f"a key of {member.name} is none")
            assert masked is not None
            assert boxed is not None
            made.masks[other] = mask_key(masked, session, place, other)
            made.boxes[other] = box_key(boxed, session, other, place)
            to_other = box_key(boxed, session, place, other)
            boxes[other] = seal(to_other, Shares(seeds[other], keys[other]), session, place, other)

        others = (other for other in range(len(members)) if other != place)
        self._check_each((members[other], partial(share_with, other)) for other in others)
        return boxes

    def _on_boxes(self, boxes: Boxes) -> list[Effect]:
        made = self._held()
        _check(self._place not in boxes.boxes, "a box from this site itself")
        masking = frozenset({*boxes.boxes, self._place})
        self._check_set(masking, range(len(self._members)), "send shares")

        def unseal_of(sender: Position, box: bytes) -> None:
            try:
                made.shares[sender] = unseal(made.boxes[sender], box, self._session, sender, self._place)
            except BadBox as fault:
                raise _Refused(f"the box of {self._members[sender].name}: {fault}") from None

        self._check_each(
            (self._members[sender], partial(unseal_of, sender, box)) for sender, box in boxes.boxes.items()
        )
        self._check_sites(masking)
        self._masking = masking
        pairs = [Stream(made.masks[other], 1 if other > self._place else -1) for other in sorted(boxes.boxes)]
        return [Mask((Stream(self_key(made.seed, self._session), 1), *pairs), self._session)]

    def _on_survivors(self, survivors: Survivors) -> list[Effect]:
        self._check_set(survivors.positions, self._masking, "survive")
        self._check_sites(survivors.positions)
        self._survivors = survivors.positions
        statement = survivors_statement(self._session, survivors.positions, len(self._members))
        signed = digest("signed", statement).hex()
        if self.terms.purpose == "statistics":
            signed = sites_digest(self._names(survivors.positions))
        promise = promise_of(Kind.SIGNED, self.terms, signed)
        return [KeepPromise(promise), Send(Agreement(self._key.sign(statement)))]

    def _on_opening(self, opening: Opening) -> list[Effect]:
        statement = survivors_statement(self._session, self._survivors, len(self._members))
        _check(opening.signatures.keys() <= self._survivors, "an agreement of a member that is no survivor")
        for position, signature in opening.signatures.items():
            member = self._members[position]
            _check(
                is_signed(member.site.key, statement, signature),
                f"the agreement of {member.name} is to other survivors",
            )
        _check(
            len(opening.signatures) >= self._threshold,
            f"{count_of(len(opening.signatures), 'agreement')}; needed: {self._threshold}",
        )
        held = self._held().shares
        shares = tuple(
            held[place].seed if place in self._survivors else held[place].key for place in sorted(self._masking)
        )
        self._secrets = None
        self._answers[Boxes] = self._answers[Boxes][0], ()  # the survivors are known: nothing is masked again
        return [Send(Reveal(shares))]

    def _check_set(
        self, positions: frozenset[Position], within: Sequence[Position] | frozenset[Position], verb: str
    ) -> None:
        _check(positions <= {*within}, f"members that {verb} are none of those before")
        _check(self._place in positions, f"this site is not among the members that {verb}")
        least = max(self._threshold, self._rules.min_others + 1, self._noise_min)
        by = f"threshold {self._threshold}, {self._rules.demand}{self._of_noise}"
        have = count_of(len(positions), "member")
        _check(len(positions) >= least, f"{have} {verb}; this site demands {least} ({by})")

    def _check_sites(self, positions: frozenset[Position]) -> None:
        fault = self._promises.fault_of_sites(self.terms, self._names(positions))
        _check(not fault, fault)

    def _names(self, positions: frozenset[Position]) -> list[str]:
        return [self._members[position].name for position in sorted(positions)]

    @property
    def _noise_min(self) -> int:
        """Fewest members whose shares of the noise suffice, without those of the colluders that this site assumes."""
        if self._privacy is None or self._privacy.noise_by != "clients":
            return 0
        return self._privacy.honest_min + max(self._privacy.colluders, self._rules.colluders_max)

    @property
    def _of_noise(self) -> str:
        if not (self._privacy and self._noise_min):
            return ""
        return f", the noise of {count_of(self._privacy.honest_min, 'honest member')}"

    # ------------------------------------------------------------ secrets

    def _held(self) -> "_Secrets":
        assert self._secrets is not None
        return self._secrets

    def _signed_keys(self, made: "_Secrets", chain: Chain) -> MemberKeys:
        fields = {
            "mask_key": made.mask.public_key().public_bytes_raw(),
            "box_key": made.box.public_key().public_bytes_raw(),
            "commitment": commitment(self.name, made.seed),
        }
        unsigned = MemberKeys(self.name, self._digest, chain=chain, site=self._site, **fields)
        signature = self._key.sign(unsigned.statement())
        return MemberKeys(self.name, self._digest, chain=chain, site=self._site, signature=signature, **fields)

    def _leave(self, reason: str, refused: tuple[str, ...] = ()) -> list[Effect]:
        if self.stage is Stage.ENDED:
            return []
        self.stage, self._secrets, self._gone = Stage.ENDED, None, Gone(reason, refused)
        self._answers.clear()
        return [Send(self._gone)]


class _Secrets:
    """The secrets of a session: in memory, until they are revealed or the session ends."""

    def __init__(self) -> None:
        self.mask, self.box = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.seed = secrets.token_bytes(SEED_BYTES)
        self.masks: dict[Position, bytes] = {}
        self.boxes: dict[Position, bytes] = {}
        self.shares: dict[Position, Shares] = {}


def _check(holds: bool, fault: str) -> None:
    if not holds:
        raise _Refused(fault)
