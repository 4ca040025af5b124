"""The streams to take off a sum of masked updates, from the reveals of its members. Pure.

    sum_{U3} x = sum_{U3} y_i - sum_{i in U3} S(self(i)) - sum_{i in U3, j in U2 - U3} sign(j - i) S(mask(i,j))

Each secret that shares give is compared with its owner's commitment, so a wrong share opens nothing: it is found by
leaving out one member after the other, and named.
"""

from collections.abc import Iterator, Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from atoll.protocol.secure.keys import mask_key, self_key
from atoll.protocol.secure.messages import Position, Roster
from atoll.protocol.secure.shamir import PRIME, BadShare, combined, weights
from atoll.protocol.secure.transcript import commitment
from atoll.protocol.value_type import value


class NotOpened(ValueError):
    """Reveals of which no `threshold` are right."""


@value
class Taken:
    """A key stream that is taken off the sum: `sign` -1 subtracts it, 1 adds it."""

    key: bytes
    sign: int

    def __repr__(self) -> str:
        """Return the sign alone: keys are in no log and no traceback."""
        return f"Taken(sign={self.sign})"


@value
class Opened:
    """What opens a sum.

    Attributes:
        streams: to take off.
        wrong: the members that have revealed a wrong share.
    """

    streams: tuple[Taken, ...]
    wrong: frozenset[Position]


def open_sum(
    roster: Roster,
    session: bytes,
    masking: frozenset[Position],
    survivors: frozenset[Position],
    reveals: Mapping[Position, Sequence[int]],
) -> Opened:
    """Return the streams of a sum.

    Args:
        roster: of the session.
        session: its id.
        masking: the members that have masked (U2).
        survivors: those of them whose masked updates are in the sum (U3).
        reveals: at least `threshold`; one share of each member of `masking` in each, in order.

    Raises:
        NotOpened: more than one reveal is wrong, or there is none to spare.
    """
    for chosen in _choices(sorted(reveals), roster.threshold):
        secrets = _secrets(roster, sorted(masking), survivors, {each: reveals[each] for each in chosen})
        if secrets is not None:
            wrong = frozenset(reveals) - frozenset(chosen) if len(chosen) < len(reveals) else frozenset()
            streams = tuple(_streams(roster, session, survivors, secrets))
            return Opened(streams, frozenset(each for each in wrong if not _fits(chosen, reveals, each)))
    raise NotOpened(f"of {len(reveals)} reveals no {roster.threshold} are right")


def _choices(members: Sequence[Position], threshold: int) -> Iterator[Sequence[Position]]:
    """Yield choices of `threshold` members: the first ones, then without one of them at a time."""
    yield members[:threshold]
    if len(members) > threshold:
        for left_out in members[:threshold]:
            yield [each for each in members if each != left_out][:threshold]


def _secrets(
    roster: Roster,
    masking: Sequence[Position],
    survivors: frozenset[Position],
    reveals: Mapping[Position, Sequence[int]],
) -> dict[Position, bytes] | None:
    """Return the secret of each member: a survivor's seed, another's mask key; None: at least one is wrong."""
    factors = weights([place + 1 for place in reveals])
    found = {}
    for index, position in enumerate(masking):
        try:
            secret = combined(factors, [shares[index] for shares in reveals.values()])
        except BadShare:
            return None
        member = roster.members[position]
        if position in survivors:
            is_right = commitment(member.name, secret) == member.commitment
        else:
            is_right = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw() == member.mask_key
        if not is_right:
            return None
        found[position] = secret
    return found


def _streams(
    roster: Roster, session: bytes, survivors: frozenset[Position], secrets: Mapping[Position, bytes]
) -> Iterator[Taken]:
    for position, secret in secrets.items():
        if position in survivors:
            yield Taken(self_key(secret, session), -1)
            continue
        private = X25519PrivateKey.from_private_bytes(secret)
        for other in sorted(survivors):
            shared = private.exchange(X25519PublicKey.from_public_bytes(roster.members[other].mask_key))
            # `other` has added the stream if it comes first in the roster, and subtracted it if not.
            yield Taken(mask_key(shared, session, position, other), -1 if other < position else 1)


def _fits(chosen: Sequence[Position], reveals: Mapping[Position, Sequence[int]], position: Position) -> bool:
    """Return whether a member's shares lie on the polynomials that those of right members determine."""
    places = [each + 1 for each in [*chosen[1:], position]]
    factors, right = weights(places), weights([each + 1 for each in chosen])
    for index, share in enumerate(reveals[position]):
        by_this = sum(f * s for f, s in zip(factors, [*(reveals[e][index] for e in chosen[1:]), share], strict=True))
        by_chosen = sum(f * reveals[e][index] for f, e in zip(right, chosen, strict=True))
        if (by_this - by_chosen) % PRIME:
            return False
    return True
