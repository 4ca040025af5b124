"""The two ways of a simulated run's secure sums: with the deployed cryptography, or with sums of encoded updates.

Both have the machines of a deployed run on both sides, the same terms, promises, stages and words, so they end with the
same bits. Only the first one makes keys, masks and shares; neither protects anything, as one process plays all parts.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.policy.config import SecurePolicy
from atoll.client.secure.member import Member, MemberRules
from atoll.client.secure.promises import Kind, PeerChains, Promise, Promises
from atoll.client.site.key_file import raw_public
from atoll.protocol.identity.certificates import Issuer, new_key, to_pem
from atoll.protocol.identity.names import NAME_ALLOWED, Identity, Role, is_name
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure.messages import MemberKeys, Roster, SiteIdentity
from atoll.protocol.secure.site_key import certify, check_certified
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.transcript import session_id
from atoll.protocol.vocabulary import ClientId, Digest
from atoll.server.folding.metric_sums import opened_metrics
from atoll.server.hosting.secure_sums import opening_of
from atoll.server.opening.streams import Taken
from atoll.server.rounds.session_events import OpeningFailed, OpenSum, SessionSum, SumOpened
from atoll.simulations.secure.unmasked_member import UnmaskedMember
from atoll.tensors.secure.masked_layout import Metrics

POLICY = SecurePolicy()
"""Policy of a simulated site: the defaults of the table `[secure]` of a policy.toml."""

RULES = MemberRules(POLICY.min_others, POLICY.colluders_max)


class Signed(NamedTuple):
    """The sums that a site has signed from one base version."""

    model: str
    """Digest of the version."""
    times: int


class Cryptography(ABC):
    """Keys and promises of a run's simulated sites, which survive a crash of their agents."""

    authorities = b""
    """The certificates of the authority of all sites, PEM; empty: keys are not certified."""

    streams_of: Callable[[SessionSum], Iterable[Taken]] | None = None
    """Returns the streams to take off a sum; None: those that its reveals open."""

    def __init__(self) -> None:
        self._promises: dict[str, Promises] = {}
        self._keys: dict[str, Ed25519PrivateKey] = {}
        self._signed: dict[str, Signed] = {}

    def promises(self, name: str) -> Promises:
        """Return the promises of a site."""
        if name not in self._promises:
            self._promises[name] = Promises(POLICY.base_repeats_max)
        return self._promises[name]

    def keep(self, name: str, promise: Promise) -> None:
        """Give a promise."""
        self.promises(name).add(promise)
        if promise.kind is Kind.SIGNED and promise.purpose == "update":
            before = self._signed.get(name, Signed("", 0))
            self._signed[name] = Signed(promise.base, 1 + (before.times if before.model == promise.base else 0))

    def signed(self, model: Digest | None) -> dict[str, int]:
        """Return how many sums from a version each site has signed, for a snapshot between two rounds."""
        return {name: each.times for name, each in sorted(self._signed.items()) if each.model == model}

    def restore(self, signed: Mapping[str, int], run: str, model: str) -> None:
        """Restore what `signed` has returned."""
        for name, count in signed.items():
            for _ in range(count):
                self.keep(name, Promise(Kind.SIGNED, run, "update", 0, 1, 0, model))

    def _key(self, name: str) -> Ed25519PrivateKey:
        if name not in self._keys:
            self._keys[name] = Ed25519PrivateKey.generate()
        return self._keys[name]

    @abstractmethod
    def member(self, name: str, terms: Terms) -> Member:
        """Return a new member of a session."""

    @abstractmethod
    def opening_of(self, effect: OpenSum, metrics: Metrics) -> SumOpened | OpeningFailed:
        """Check what members have revealed, and return the outcome; `metrics`: of evaluations."""


class NoMasks(Cryptography):
    """Cryptography in name: the sum of a session is that of encoded updates, without masks."""

    def __init__(self) -> None:
        super().__init__()
        self.streams_of = lambda summed: ()
        self._newest: tuple[Roster | None, bytes] = None, b""

    def member(self, name: str, terms: Terms) -> Member:
        """Return a new member of a session, which masks nothing."""
        key = self._key(name)
        site = SiteIdentity(raw_public(key), b"", b"")
        promises = self.promises(name)
        return UnmaskedMember(name, terms, RULES, key=key, site=site, promises=promises, session_id=self._session_id)

    def _session_id(self, terms: Terms, roster: Roster) -> bytes:
        """Return the id of a session; all of its members ask for it, one after the other."""
        if self._newest[0] is not roster:
            members = ((member.statement(), member.signature) for member in roster.members)
            self._newest = roster, session_id(terms.digest, roster.threshold, members)
        return self._newest[1]

    def opening_of(self, effect: OpenSum, metrics: Metrics) -> SumOpened | OpeningFailed:
        """Return that the sum is open: nothing masks it."""
        found = opened_metrics(effect.words, (), metrics) if effect.purpose == "evaluation" else {}
        return SumOpened(effect.round_id, effect.sum.session, effect.sum.attempt, (), effect.purpose, found)


class RealMasks(Cryptography):
    """Deployed cryptography: certified site keys, masks, shares, and an opening by what members reveal."""

    def __init__(self) -> None:
        super().__init__()
        self._issuer = Issuer.create("simulated", now=time.time())
        self.authorities = to_pem(self._issuer.certificate)
        self._identities: dict[str, SiteIdentity] = {}
        self._peers: dict[str, PeerChains] = {}

    def member(self, name: str, terms: Terms) -> Member:
        """Return a new member of a session."""
        return Member(
            name,
            terms,
            RULES,
            key=self._key(name),
            site=self._identity(name),
            promises=self.promises(name),
            peers=self._peers.setdefault(name, PeerChains()),
            trust=self._trust(),
        )

    def _identity(self, name: str) -> SiteIdentity:
        if name not in self._identities:
            key = new_key()
            leaf = self._issuer.issue(key.public_key(), Identity(Role.CLIENT, name), now=time.time())
            self._identities[name] = certify(name, raw_public(self._key(name)), key, to_pem(leaf))
        return self._identities[name]

    def _trust(self) -> Callable[[MemberKeys], None]:
        owners: dict[bytes, str] = {}

        def check(keys: MemberKeys) -> None:
            check_certified(keys.site, keys.name, self.authorities, time.time())
            if (other := owners.setdefault(keys.site.key, keys.name)) != keys.name:
                raise NotTrusted(f"{other} and {keys.name} have one site key: one site would count twice")

        return check

    def opening_of(self, effect: OpenSum, metrics: Metrics) -> SumOpened | OpeningFailed:
        """Open a sum by what its members have revealed."""
        return opening_of(effect, metrics)


def faults_of_names(names: Iterable[ClientId]) -> list[str]:
    """List the fault of clients with names that a message of a session refuses, as a certificate does."""
    if not (wrong := [name for name in names if not is_name(name)]):
        return []
    some = ", ".join(f"{name!r:.80}" for name in wrong[:5])
    return [f"secure: got the clients {some}, whose names a session refuses, as certificates do: {NAME_ALLOWED}"]
