"""A site's part in secure sums: which terms it accepts, whom it trusts, what it has promised, under which key.

Every method is quick and is called on the agent's event loop, as those of the gate. A promise costs one durable write.
"""

import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.client.policy.config import SecurePolicy
from atoll.client.policy.decide import terms_fault
from atoll.client.policy.gate import Gate
from atoll.client.policy.small_cells import StatisticsTerms
from atoll.client.secure.member import Member, MemberRules, Trust
from atoll.client.secure.promises import Kind, Promise, Promises
from atoll.client.site.key_file import FILE, make_site_key, raw_public, read_site_key
from atoll.client.site.peers import PeersFault, PeersFile
from atoll.ground.folders import in_words
from atoll.ground.printable import count_of
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.identity.keeper import Keeper
from atoll.protocol.identity.statement import NotTrusted
from atoll.protocol.secure.messages import MemberKeys, SiteIdentity
from atoll.protocol.secure.site_key import certify, check_certified, fingerprint, shown
from atoll.protocol.secure.terms import Terms
from atoll.protocol.settings import ConfigError, or_faults
from atoll.protocol.vocabulary import RunId

JOINED, SIGNED, LEFT, OPENED = "secure.joined", "secure.signed", "secure.left", "secure.opened"
"""Actions of the log of decisions."""

_LEAST_SITES = {"evaluation": "metrics_min_sites", "statistics": "statistics_min_sites"}
"""The policy's setting of the least number of sites in a sum, by its purpose."""


class SiteSecurity:
    """A site's part in secure sums.

    Args:
        name: of the client.
        folder: the agent's state directory.
        gate: the site's policy, its promises and its log; it allows nothing while a file of this site is damaged.
        keeper: of the client's credential; None: the agent is `--insecure`, and joins no session.
        now: returns seconds since the epoch.

    Raises:
        ConfigError: the site key, the promises or the peers cannot be used: all faults at once.
    """

    def __init__(
        self, name: str, folder: Path, gate: Gate, keeper: Keeper | None, now: Callable[[], float] = time.time
    ) -> None:
        self._name, self._gate, self._keeper, self._now = name, gate, keeper, now
        self._peers, self._promises = PeersFile(folder), gate.promises
        self._identity: SiteIdentity | None = None
        self._policy = SecurePolicy()
        faults = [fault for fault in (self._promises.fault, self._peers.fault) if fault]
        self._key = None if keeper is None else or_faults(lambda: self._site_key(folder / "identity"), faults)
        if faults:
            raise ConfigError(faults)
        gate.watch(lambda: self._peers.fault)

    def _site_key(self, folder: Path) -> Ed25519PrivateKey | None:
        """Return the site's key, made at the first start; None: there is none, and the promises are broken.

        Raises:
            ConfigError: it cannot be used, or is another than the promises'.
        """
        key, recorded = read_site_key(folder), self._promises.site_key
        if not recorded and not self._promises.fault:
            try:
                key = key or make_site_key(folder)
                self._promises.begin(recorded := raw_public(key))
            except OSError as error:
                raise ConfigError([f"state: {in_words(error)}"]) from None
        if not recorded or (key is not None and raw_public(key) == recorded):
            return key
        found = "is missing" if key is None else f"has the key {shown(fingerprint(raw_public(key)))}"
        promised = count_of(self._promises.num_promises, "promise")
        raise ConfigError(
            [
                f"{folder / FILE} {found}; this site's {promised} were given with the key "
                f"{shown(fingerprint(recorded))}: put that file back from a copy, or make a new key with `atoll site "
                "accept-rollback --new-key`, which peers pin again"
            ]
        )

    # ------------------------------------------------------------ what is allowed

    @property
    def joins(self) -> bool:
        """Whether this agent can join sessions: it has a site key and a certificate, so it is not `--insecure`."""
        return self._key is not None

    @property
    def required(self) -> bool:
        """Whether the policy lets nothing leave outside of a secure sum."""
        return self._now_policy().required

    @property
    def tells_examples(self) -> bool:
        """Whether the coordinator may know the number of this site's examples, in Hello."""
        return self._now_policy().tells_examples

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the site key, 32 hexadecimal digits; empty: there is none."""
        return "" if self._key is None else fingerprint(raw_public(self._key))

    def fault(self, terms: Terms, run: RunId) -> str:
        """Return why this site does not join a session under these terms; empty: it may.

        Args:
            terms: of the invitation.
            run: of the invitation.
        """
        return self.policy_fault(terms, run) or self._promised().fault(terms)

    def policy_fault(self, terms: Terms, run: RunId) -> str:
        """Return why the policy does not allow these terms, whatever this site has promised; empty: it does.

        It holds for a session in progress, too, whose own promise is among those that `fault` reads.
        """
        if fault := self._file_fault():
            return fault
        if self._key is None:
            return "this agent has no certificate (--insecure), so it joins no secure sum: enrol it with a join code"
        if terms.run != run:
            return f"terms of run {terms.run!r} in an invitation of run {run!r}"
        if self._gate.secure is None:
            return "this site's policy is not valid now: nothing is allowed until it is"
        if terms.purpose != "update" and self._disclosure(terms).metrics is MetricsLeave.NONE:
            return f"no {'metrics' if terms.purpose == 'evaluation' else 'statistics'} leave this site"
        return terms_fault(self._now_policy(), terms)

    @property
    def statistics_terms(self) -> StatisticsTerms:
        """Return what of this site's statistics may be in a sum."""
        return self._gate.statistics_terms

    def _disclosure(self, terms: Terms) -> Disclosure:
        of_statistics = terms.purpose == "statistics"
        return self._gate.statistics_terms.disclosure if of_statistics else self._gate.disclosure

    def has_joined(self, terms: Terms) -> bool:
        """Return whether this site has joined this attempt at a sum or a later one, now or before a restart."""
        return self._promised().attempt_of(terms.run, terms.purpose, terms.round) >= terms.attempt

    def _file_fault(self) -> str:
        return "this site's files for secure sums are damaged" if self._promises.fault or self._peers.fault else ""

    def _now_policy(self) -> SecurePolicy:
        """Return the policy's section: while the policy is not valid, the last one, as the gate then allows nothing."""
        self._policy = self._gate.secure or self._policy
        return self._policy

    def _promised(self) -> Promises:
        policy, promises = self._now_policy(), self._promises.promises
        promises.base_repeats_max, promises.sets_max = policy.base_repeats_max, policy.statistics_sets_max
        return promises

    # ------------------------------------------------------------ a session

    def member(self, name: str, terms: Terms) -> Member:
        """Return a new member of a session, under the present policy.

        Args:
            name: of this client.
            terms: for which `fault` returns nothing.
        """
        assert self._key is not None
        policy = self._now_policy()
        rules = MemberRules(policy.min_others, policy.colluders_max)
        if terms.purpose != "update" and (sites := self._disclosure(terms).min_sites) > policy.min_others + 1:
            least = f"{_LEAST_SITES[terms.purpose]} = {sites}"
            rules = MemberRules(sites - 1, policy.colluders_max, least)
        return Member(
            name,
            terms,
            rules,
            key=self._key,
            site=self.identity,
            promises=self._promised(),
            peers=self._promises.peers,
            trust=self._trust(self.identity.key),
        )

    @property
    def identity(self) -> SiteIdentity:
        """The site's public key, certified by the newest certificate of its client."""
        assert self._key is not None
        assert self._keeper is not None
        credential = self._keeper.current
        if self._identity is None or self._identity.certificate != credential.certificate_pem:
            self._identity = certify(self._name, raw_public(self._key), credential.key, credential.certificate_pem)
        return self._identity

    def _trust(self, own: bytes) -> Trust:
        """Return the check of the peers of one session."""
        owners = {own: self._name}

        def check(keys: MemberKeys) -> None:
            assert self._keeper is not None
            check_certified(keys.site, keys.name, self._keeper.current.ca_pem, self._now())
            if (other := owners.setdefault(keys.site.key, keys.name)) != keys.name:
                raise NotTrusted(f"{other} and {keys.name} have one site key: one site would count twice")
            self._check_pinned(keys.name, fingerprint(keys.site.key))

        return check

    def _check_pinned(self, name: str, digits: str) -> None:
        try:
            peers = self._peers.read()
        except PeersFault:
            raise NotTrusted("this site's file of its peers is damaged: it trusts none") from None
        if name in peers.distrusted:
            raise NotTrusted(f"{name} is distrusted here, by `atoll site distrust`")
        pinned = peers.pinned.get(name)
        if pinned is None and self._now_policy().trust == "authority":
            return
        if pinned is None:
            raise NotTrusted(
                f"{name} is not pinned here; its site key is {shown(digits)}: ask its operator, then `atoll site trust "
                f"{name} FINGERPRINT`"
            )
        if pinned != digits:
            raise NotTrusted(
                f"the site key of {name} is {shown(digits)}; pinned here is {shown(pinned)}: ask its operator"
            )

    def keep(self, promise: Promise) -> None:
        """Give a promise: durable and in the log of decisions on return, with the peers' chains that were learned.

        Raises:
            OSError: it cannot be recorded; the member must leave its session, and nothing of it may be sent.
        """
        self._promises.keep(promise)
        end = f"promise {self._promises.num_promises}"
        if promise.kind is Kind.JOINED:
            self._gate.note_session(promise, JOINED, f"this site joins a secure sum: {end}")
        else:
            self._gate.note_session(promise, SIGNED, f"this site has agreed to the sites in a secure sum: {end}")

    def remember_peers(self) -> None:
        """Make the ends of peers' chains durable that were learned; before the shares of a session leave.

        Raises:
            OSError: they cannot be recorded.
        """
        self._promises.remember_peers()

    def log(self, of: Terms, text: str, action: str = LEFT) -> None:
        """Write a line into the site's log of decisions, and remember what a failed check has shown of a peer.

        Args:
            of: terms of the session.
            text: the check that failed, or the outcome.
            action: `LEFT` or `OPENED`.

        Raises:
            OSError: it cannot be recorded.
        """
        self._promises.remember_peers()
        self._gate.note_session(of, action, text)
