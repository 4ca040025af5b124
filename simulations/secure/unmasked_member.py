"""A member of a simulated session without masks: the checks of sizes, stages and promises, and no secret.

Its messages have the form of a member's, with digests or zeros in place of keys, boxes and shares, so that the
coordinator's machine is the deployed one. Its signature of the survivors is real, as that machine checks it.
"""

from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.secure.member import Effect, Mask, Member, MemberRules, Send
from atoll.client.secure.promises import PeerChains, Promises
from atoll.protocol.secure.messages import (
    BOX_BYTES,
    Boxes,
    Chain,
    MemberKeys,
    Opening,
    Reveal,
    Roster,
    SealedShares,
    SiteIdentity,
)
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.transcript import digest

_BOX, _SIGNATURE = bytes(BOX_BYTES), bytes(64)


class UnmaskedMember(Member):
    """Member of a session whose sum is that of encoded updates.

    Args:
        name: of the client.
        terms: of the sum.
        rules: of the site.
        key: of the site, for its signature of the survivors.
        site: its public part.
        promises: of the site.
        session_id: returns the id of a roster's session under these terms.
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
        session_id: Callable[[Terms, Roster], bytes],
    ) -> None:
        super().__init__(
            name, terms, rules, key=key, site=site, promises=promises, peers=PeerChains(), trust=lambda keys: None
        )
        self._id_of = session_id

    def _signed_keys(self, made: object, chain: Chain) -> MemberKeys:
        # no two members of a roster may have one key
        keys = {kind: digest(kind, self.name.encode()) for kind in ("mask_key", "box_key", "commitment")}
        return MemberKeys(self.name, self.terms.digest, chain=chain, site=self._site, signature=_SIGNATURE, **keys)

    def _on_roster(self, roster: Roster) -> list[Effect]:
        self._check_size(len(roster.members), roster.threshold)
        self._members, self._threshold = roster.members, roster.threshold
        self._place = [member.name for member in roster.members].index(self.name)
        self._session = self._id_of(self.terms, roster)
        others = (position for position in range(len(roster.members)) if position != self._place)
        return [Send(SealedShares(dict.fromkeys(others, _BOX)))]

    def _on_boxes(self, boxes: Boxes) -> list[Effect]:
        masking = frozenset({*boxes.boxes, self._place})
        self._check_set(masking, range(len(self._members)), "send shares")
        self._masking = masking
        return [Mask(())]

    def _on_opening(self, opening: Opening) -> list[Effect]:
        self._secrets = None
        self._answers[Boxes] = self._answers[Boxes][0], ()
        return [Send(Reveal((0,) * len(self._masking)))]
