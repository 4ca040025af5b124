"""The promises of a site: which sums it has joined and signed, in a hash chain that its peers remember. Pure.

    hash_k = H("promise", hash_{k-1}, content_k),    hash_0 = 32 zero bytes
    count_k = count_{k-1} + [promise k is JOINED],   count_0 = 0

A site that loses promises (a backup of its state is put back) could open one update twice. So every member's signed
keys have the end of its chain, and peers remember the last ends that they saw: a known count with another hash is a
fork, and its owner is refused until its peers trust a new key.

Peers see an end only where it is JOINED, so the others are in the hash and not in the count: with them a site that was
put back to the instant between two promises of a session would show counts for ever that no peer has seen.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.ground.printable import count_of
from atoll.protocol.secure.messages import Chain
from atoll.protocol.secure.terms import Terms
from atoll.protocol.secure.transcript import digest
from atoll.protocol.value_type import value

GENESIS = Chain(0, bytes(32))
REMEMBERED = 64
"""Ends of a peer's chain that a site remembers."""


_WORK = {"update": "round", "evaluation": "the evaluation of version", "statistics": "statistics"}
"""What the number in the terms is the number of, by the purpose."""


class Kind(StrEnum):
    """The kind of a promise."""

    JOINED = "joined"
    """Keys were sent for an attempt: no attempt of this round up to it is joined again."""
    SIGNED = "signed"
    """Survivors were signed: no other attempt of this round is joined."""


@value
class Promise:
    """An entry of the chain: what a site has committed itself to.

    Attributes:
        kind: of the promise.
        run, purpose, round, attempt, session: as in the terms.
        base: digest of the base version's manifest.
        survivors: digest of the signed statement, or of the sites in a sum of statistics (`sites_digest`); empty for
            JOINED.
    """

    kind: Kind
    run: str
    purpose: str
    round: int
    attempt: int
    session: int
    base: str
    survivors: str = ""

    def content(self) -> bytes:
        """Return the entry as bytes."""
        fields = [self.kind, self.run, self.purpose, self.round, self.attempt, self.session, self.base, self.survivors]
        return json.dumps(fields, separators=(",", ":")).encode()


def promise_of(kind: Kind, terms: Terms, survivors: str = "") -> Promise:
    """Return the promise of a site that joins, or signs survivors, under these terms."""
    at = (terms.run, terms.purpose, terms.round, terms.attempt, terms.session)
    return Promise(kind, *at, terms.model, survivors)


def sites_digest(names: Iterable[str]) -> str:
    """Return SHA-256 of the names of the sites in a sum."""
    return digest("sites", *(name.encode() for name in sorted(names))).hex()


def extended(chain: Chain, promise: Promise) -> Chain:
    """Return the end of a chain after one more promise."""
    return Chain(chain.count + (promise.kind is Kind.JOINED), digest("promise", chain.hash, promise.content()))


@dataclass(slots=True)
class Promises:
    """What the promises of a site forbid; read from their entries, in order."""

    base_repeats_max: int
    sets_max: int = 1
    """Most sets of sites in the sums of one task's statistics."""
    chain: Chain = GENESIS
    _newest: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _attempts: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _signed: set[tuple[str, str, int]] = field(default_factory=set)
    _bases: dict[tuple[str, str], int] = field(default_factory=dict)
    _sets: dict[str, set[str]] = field(default_factory=dict)

    def add(self, promise: Promise) -> None:
        """Take in an entry that is durable."""
        self.chain = extended(self.chain, promise)
        of_run = _order_of(promise.run, promise.purpose, promise.base)
        if promise.kind is Kind.JOINED:
            round_ = promise.run, promise.purpose, promise.round
            self._attempts[round_] = max(self._attempts.get(round_, 0), promise.attempt)
            self._newest[of_run] = max(self._newest.get(of_run, (0, 0)), (promise.round, promise.attempt))
        else:
            self._signed.add((promise.run, promise.purpose, promise.round))
            base = promise.base, promise.purpose
            self._bases[base] = self._bases.get(base, 0) + 1
            if promise.purpose == "statistics":
                self._sets.setdefault(promise.base, set()).add(promise.survivors)

    def attempt_of(self, run: str, purpose: str, round_id: int) -> int:
        """Return the newest attempt at a round's sum that this site has joined; 0: none."""
        return self._attempts.get((run, purpose, round_id), 0)

    def fault(self, terms: Terms) -> str:
        """Return why a session under these terms must not be joined; empty: it may."""
        newest = self._newest.get(_order_of(terms.run, terms.purpose, terms.model), (0, 0))
        what = _WORK[terms.purpose]
        if (terms.run, terms.purpose, terms.round) in self._signed:
            return f"this site has signed the survivors of {what} {terms.round}: no other attempt of it is joined"
        if (terms.round, terms.attempt) <= newest:
            return (
                f"{what} {terms.round}, attempt {terms.attempt} is not above the newest that this site has joined: "
                f"{what} {newest[0]}, attempt {newest[1]}"
            )
        if terms.purpose == "statistics":
            return ""  # the sites in it decide, which are not known yet
        return self._fault_of_base(terms)

    def _fault_of_base(self, terms: Terms) -> str:
        """Return why no further sum from the terms' base version may be signed; empty: one may."""
        signed, what = self._bases.get((terms.model, terms.purpose), 0), _WORK[terms.purpose]
        if terms.purpose != "update" and signed:
            return (
                f"this site has signed a sum of {what} {terms.base} already: two sums of the same metrics over other "
                "sites would tell those of the sites that differ"
            )
        if signed >= self.base_repeats_max:
            return (
                f"this site has signed {count_of(signed, 'sum')} from version {terms.base}'s model, over all runs; "
                f"base_repeats_max = {self.base_repeats_max}: start the run from another seed or model.start, or raise "
                "it in this site's policy"
            )
        return ""

    def fault_of_sites(self, terms: Terms, names: Iterable[str]) -> str:
        """Return why a sum must not be over these sites, before this site masks and before it signs; empty: it may.

        Sums from one base version are counted once more: those of several runs may have been joined before any of them
        was signed.

        Sums of one task's statistics are over one set of sites, in any run and of any layout: two that differ by a site
        would tell its numbers. They are joined in the order of their requests, and none is signed after a later one was
        joined: so a site that has signed one set is within no later sum over another.
        """
        if terms.purpose != "statistics":
            return self._fault_of_base(terms)
        newest = self._newest.get(_order_of(terms.run, terms.purpose, terms.model), (0, 0))
        if newest != (terms.round, terms.attempt):
            since = f"request {newest[0]} for statistics of this task, attempt {newest[1]}"
            return f"this site has joined a later one: {since}"
        known = self._sets.get(terms.model, set())
        if sites_digest(names) in known or len(known) < self.sets_max:
            return ""
        sets = count_of(len(known), "set of sites", "sets of sites")
        return (
            f"this site has signed statistics of {terms.task} over {sets}, and this sum would be over another: two "
            "sums that differ by a site tell its numbers. Ask the same sites again, or its operator raises "
            f"statistics_sets_max = {self.sets_max} in its policy"
        )


def _order_of(run: str, purpose: str, base: str) -> tuple[str, str]:
    """Return whose sums are in one order: a run's, or of statistics those of one task in all runs."""
    return (base if purpose == "statistics" else run), purpose


@dataclass(slots=True)
class PeerChains:
    """The ends of peers' chains, by site key: the last `REMEMBERED` of each."""

    forked: set[bytes] = field(default_factory=set)
    """Site keys with two histories: for good, as the later ends of a site that was put back are new to every peer."""
    _ends: dict[bytes, dict[int, bytes]] = field(default_factory=dict)

    def is_fork(self, key: bytes, chain: Chain) -> bool:
        """Return whether a peer shows another history than before, or an end from before all that are remembered.

        A lower count that is remembered is no fork: the messages of two runs overtake each other.
        """
        ends = self._ends.get(key, {})
        if key in self.forked:
            return True
        is_old = len(ends) == REMEMBERED and chain.count < min(ends)
        return is_old or ends.get(chain.count, chain.hash) != chain.hash

    def accuse(self, key: bytes, chain: Chain) -> None:
        """Remember a peer as forked, if the end that it shows contradicts one that it has shown before."""
        if self._ends.get(key, {}).get(chain.count, chain.hash) != chain.hash:
            self.forked.add(key)

    def remember(self, key: bytes, chain: Chain) -> None:
        """Remember the end of a peer's chain."""
        ends = self._ends.setdefault(key, {})
        ends[chain.count] = chain.hash
        for count in sorted(ends)[:-REMEMBERED]:
            del ends[count]

    def items(self) -> Iterable[tuple[bytes, Chain]]:
        """Yield all remembered ends, by site key."""
        return ((key, Chain(count, digest)) for key, ends in self._ends.items() for count, digest in ends.items())
