"""The oracle of privacy budgets: what each client has spent, counted from what may have been released.

A use is counted when an update may become part of something that is seen: with the first fold of its round, in an
asynchronous run with its acceptance, and where the clients add the noise with the boxes that let an attempt's masked
updates leave. Epsilon is checked by the privacy profile of the Gaussian mechanism (Balle and Wang 2018, theorem 8), not
by the product's account:

    delta(epsilon) = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu),   mu^2 = uses steps / z^2
"""

import math
from collections import Counter
from collections.abc import Iterator

from atoll.protocol.secure.messages import Boxes
from atoll.protocol.vocabulary import ClientId, RoundId, RunState
from atoll.server.rounds.events import Abandon, Accept, Aggregate, AuditCharge, Effect, Event, FilesLost
from atoll.server.rounds.privacy_rules import ExampleRules, PrivacyRules
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
    steps = rules.steps if isinstance(rules, ExampleRules) else 1
    mu = math.sqrt(uses * steps) / rules.noise_multiplier
    upper, lower = (0.5 * math.erfc((rules.epsilon / mu + side * mu / 2) / math.sqrt(2)) for side in (-1, 1))
    return upper - math.exp(rules.epsilon) * lower <= rules.delta * (1 + 1e-9)


def _ledger(history: History, rules: PrivacyRules, uses: Counter[ClientId]) -> Iterator[str]:
    """Check the charges of members at the end, those of records, and an end by the budget."""
    assert history.machine is not None
    ledger = history.machine.ledger
    members = ledger.membership.members
    for client_id, member in members.items():
        if member.uses != uses[client_id]:
            yield f"{client_id} was charged {member.uses} times, and used {uses[client_id]} times"
        if not math.isclose(member.spent, member.uses * rules.cost, rel_tol=1e-9, abs_tol=1e-12):
            yield f"{client_id} has spent {member.spent} in {member.uses} uses"
    charges: dict[RoundId, int] = {n: r.charge.uses for n, r in history.records.items() if r.charge is not None}
    most = max(uses.values(), default=0)
    if [*charges.values()] != sorted(charges.values()) or max(charges.values(), default=0) > most:
        yield f"the charges of the records are {charges}, and the most used client is used {most} times"
    may_be_used = [
        name for name in members if uses[name] < rules.participations_max and _is_within(rules, uses[name] + 1)
    ]
    quorum = history.scenario.rules.policy.quorum_count
    if ledger.state is RunState.FINISHED and SPENT in ledger.cause and len(may_be_used) >= quorum:
        yield f"the run ended by its budget, and {', '.join(may_be_used)} may be used"
