"""The oracle of privacy budgets: what each client has spent, counted from what may have been released.

A use is counted when an update may become part of something that is seen: with the first fold of its round, in an
asynchronous run with its acceptance, and where the clients add the noise with the boxes that let an attempt's masked
updates leave. Epsilon is checked by the privacy profile of the Gaussian mechanism (Balle and Wang 2018, theorem 8), not
by the product's account:

    delta(epsilon) = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu),   mu^2 = uses steps / z^2

Of correlated noise mu is the length by which the versions of a client move all releases, taken through the inverse of
the noise's matrix, over that of the most uses as close as they may be, over z.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from atoll.protocol.secure.messages import Boxes
from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, RoundId, RunState, Version
from atoll.server.rounds.events import (
    Abandon,
    Accept,
    Aggregate,
    AuditCharge,
    Commit,
    Effect,
    Event,
    FilesLost,
    NoiseRow,
    RunStarted,
    set_digest,
)
from atoll.server.rounds.privacy_rules import CorrelatedRules, ExampleRules, PrivacyRules
from atoll.server.rounds.run_rules import RunRules
from atoll.server.rounds.session_events import OpenSum, SumOpened, TellMember
from tests.histories.history import History

SPENT = "the privacy budget is spent"


def faults_of_budgets(history: History) -> Iterator[str]:
    """Yield the faults of the charges of a run with a guarantee for clients or for examples."""
    if (rules := history.scenario.rules.privacy) is None:
        return
    uses: Counter[ClientId] = Counter()
    releases, folded = _Releases(history.scenario.rules), set[RoundId]()
    for step in history.steps:
        is_charged = False
        released = [*releases.by_event(step.event)]
        for effect in step.effects:
            is_charged |= isinstance(effect, AuditCharge)
            released += releases.by_effect(effect)
            if isinstance(effect, Aggregate) and effect.round_id not in folded:
                folded.add(effect.round_id)
                if not is_charged and rules.noise_by != "clients":
                    yield f"at {step.at:.3f} round {effect.round_id} is folded before it is charged"
        for client_id in released:
            uses[client_id] += 1
            if uses[client_id] > rules.participations_max or not _is_within(rules, uses[client_id]):
                yield f"at {step.at:.3f} {client_id} is used {uses[client_id]} times, beyond its budget"
    yield from _ledger(history, rules, uses)
    yield from _audited(history, rules, uses)
    yield from _samples(history, rules)
    if isinstance(rules, CorrelatedRules):
        yield from _versions(history, rules)


def _audited(history: History, rules: PrivacyRules, uses: Counter[ClientId]) -> Iterator[str]:
    """Check that the audit log of an ended run has each charge once."""
    assert history.machine is not None
    if history.machine.ledger.state not in TERMINAL:
        return
    charges = [effect.charge for _, effect in history.effects() if isinstance(effect, AuditCharge)]
    audited = sum(charge.charges or charge.clients for charge in charges)
    if rules.noise_by == "clients":  # each attempt's entry has all of the round's
        last = {e.rounds: e.charge.charges for _, e in history.effects() if isinstance(e, AuditCharge)}
        audited = sum(last.values())
    if audited != uses.total():
        yield f"the audit log has {audited} charges, and clients were used {uses.total()} times"


def _samples(history: History, rules: PrivacyRules) -> Iterator[str]:
    """Yield the clients whose masked updates of one sample may leave in two attempts: two noises on it cost more."""
    if not isinstance(rules, ExampleRules) or rules.noise_by != "clients":
        return
    attempts: defaultdict[tuple[ClientId, RoundId], set[int]] = defaultdict(set)
    for step, effect in history.effects():
        if isinstance(effect, TellMember) and isinstance(effect.question, Boxes):
            attempts[effect.client_id, effect.round_id].add(effect.attempt)
            if len(attempts[effect.client_id, effect.round_id]) > 1:
                yield f"at {step.at:.3f} {effect.client_id} adds two noises to its sample of round {effect.round_id}"


def _versions(history: History, rules: CorrelatedRules) -> Iterator[str]:
    """Check the noises of folds, the distances of a client's versions, and that it is charged for what these cost."""
    model, folds = Digest(""), dict[RoundId, Aggregate]()
    noises, bases = list[NoiseRow](), defaultdict[ClientId, list[Version]](list)
    for step in history.steps:
        model = step.event.model_digest if isinstance(step.event, RunStarted) else model
        for effect in step.effects:
            if isinstance(effect, Aggregate):
                folds[effect.round_id] = effect
                if [*effect.earlier] != noises[: rules.bands - 1]:
                    yield f"at {step.at:.3f} round {effect.round_id} takes off {effect.earlier}, not {noises}"
            elif isinstance(effect, Commit):
                fold, updates = folds[effect.round_id], set_digest(effect.used)
                noises.insert(0, NoiseRow(effect.round_id, model, updates))
                model = effect.model_digest
                for each in fold.contributions:
                    bases[each.client_id].append(fold.base_version)
    assert history.machine is not None
    members = history.machine.ledger.membership.members
    for client_id, versions in bases.items():
        if any(after - before < rules.apart for before, after in pairwise(versions)):
            yield f"{client_id} is in versions that are not {rules.apart} apart: {versions}"
        if members[client_id].spent < _mu(rules, versions) ** 2 * (1 - 1e-9):
            yield f"{client_id} has spent {members[client_id].spent} in versions {versions}"


def _mu(rules: CorrelatedRules, versions: Iterable[int]) -> float:
    most = range(0, rules.participations_max * rules.apart, rules.apart)
    return _moved(rules, versions) / _moved(rules, most) / rules.noise_multiplier


def _moved(rules: CorrelatedRules, versions: Iterable[int]) -> float:
    """Return the length of D^-1 v, where v has 1 in each of these versions, and D (1 - x)^(1/2) as far as its bands."""
    d = [-math.comb(2 * j, j) / (4**j * (2 * j - 1)) for j in range(rules.bands)]
    wanted, found = {*versions}, list[float]()
    for t in range(rules.rounds):
        found.append((t in wanted) - sum(d[j] * found[t - j] for j in range(1, min(rules.bands, t + 1))))
    return math.hypot(*found)


class _Releases:
    """The clients whose updates the steps of a run release, each as often as it does.

    Args:
        rules: of the run.
    """

    def __init__(self, rules: RunRules) -> None:
        assert rules.privacy is not None
        self._is_asynchronous, self._is_secure = rules.policy.is_asynchronous, rules.secure is not None
        self._is_shared = rules.privacy.noise_by == "clients"
        self._seen: set[object] = set()
        self._openings: dict[tuple[RoundId, int, int], list[ClientId]] = {}

    def by_event(self, event: Event) -> Iterator[ClientId]:
        """Yield those of an event: the members of a sum that has opened."""
        if isinstance(event, FilesLost):  # an update that is sent again is charged again
            self._seen.difference_update(event.updates)
        if isinstance(event, SumOpened) and not self._is_shared:
            yield from self._openings.pop((event.round_id, event.session, event.attempt), ())

    def by_effect(self, effect: Effect) -> Iterator[ClientId]:
        """Yield those of an effect."""
        match effect:
            case OpenSum(round_id, summed):
                names = [ClientId(summed.roster.members[position].name) for position in sorted(summed.survivors)]
                if self._is_new((round_id, summed.session, summed.attempt)):
                    self._openings[round_id, summed.session, summed.attempt] = names
            case Abandon(round_id):  # nothing of a sum that opens now is published
                self._openings = {key: names for key, names in self._openings.items() if key[0] != round_id}
            case TellMember(client_id, round_id, session, attempt, question=Boxes()) if self._is_shared:
                if self._is_new((client_id, round_id, session, attempt)):
                    yield client_id
            case Accept(client_id, digest=digest) if self._is_asynchronous:
                if self._is_new(digest):
                    yield client_id
            case Aggregate(round_id, contributions=contributions) if not (self._is_asynchronous or self._is_secure):
                if self._is_new(round_id):
                    yield from (each.client_id for each in contributions)

    def _is_new(self, what: object) -> bool:
        is_new = what not in self._seen
        self._seen.add(what)
        return is_new


def _is_within(rules: PrivacyRules, uses: int) -> bool:
    mu = math.sqrt(_spent(rules, uses))
    if isinstance(rules, ExampleRules):
        mu /= rules.noise_multiplier
    upper, lower = (0.5 * math.erfc((rules.epsilon / mu + side * mu / 2) / math.sqrt(2)) for side in (-1, 1))
    return upper - math.exp(rules.epsilon) * lower <= rules.delta * (1 + 1e-9)


def _spent(rules: PrivacyRules, uses: int) -> float:
    """Return what a client has spent: of examples the steps, else mu^2."""
    if isinstance(rules, CorrelatedRules):
        uses = min(uses, rules.participations_max)
        return _mu(rules, range(0, uses * rules.apart, rules.apart)) ** 2
    return uses * rules.steps if isinstance(rules, ExampleRules) else uses / rules.noise_multiplier**2


def _ledger(history: History, rules: PrivacyRules, uses: Counter[ClientId]) -> Iterator[str]:
    """Check the charges of members at the end, those of records, and an end by the budget."""
    assert history.machine is not None
    ledger = history.machine.ledger
    members = ledger.membership.members
    for client_id, member in members.items():
        if member.uses != uses[client_id]:
            yield f"{client_id} was charged {member.uses} times, and used {uses[client_id]} times"
        if not math.isclose(member.spent, _spent(rules, member.uses), rel_tol=1e-9, abs_tol=1e-12):
            yield f"{client_id} has spent {member.spent} in {member.uses} uses"
    charges: dict[RoundId, int] = {n: r.charge.uses for n, r in history.records.items() if r.charge is not None}
    most = max(uses.values(), default=0)
    if [*charges.values()] != sorted(charges.values()) or max(charges.values(), default=0) > most:
        yield f"the charges of the records are {charges}, and the most used client is used {most} times"
    may_be_used = [
        name
        for name, member in members.items()
        if uses[name] < rules.participations_max
        and _is_within(rules, uses[name] + 1)
        and member.apart_until <= ledger.version
    ]
    quorum = history.scenario.rules.policy.quorum_count
    if ledger.state is RunState.FINISHED and SPENT in ledger.cause and len(may_be_used) >= quorum:
        yield f"the run ended by its budget, and {', '.join(may_be_used)} may be used"
