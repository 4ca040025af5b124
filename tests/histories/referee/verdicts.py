"""The verdict of the policy on one update, derived independently of the machines."""

import math
from enum import Enum, auto

from atoll.protocol.vocabulary import Fate, RejectReason
from atoll.server.rounds.events import Update
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.run_rules import RunRules
from tests.histories.referee.run_facts import RoundFacts, RunFacts


class Verdict(Enum):
    """The fate of an update."""

    ON_TIME = auto()
    CARRIED = auto()
    AGAIN = auto()  # accepted before; only the answer was lost
    LATE = auto()  # refused because it is too late
    REFUSED = auto()  # refused for its claims; the client may not try again in this round
    NOT_HIS = auto()  # refused without any consequence for the client


def verdict_on(update: Update, run: RunFacts, rules: RunRules) -> tuple[Verdict, RejectReason | None]:
    """Return the verdict, and the reason if it is not an acceptance."""
    round_ = run.rounds.get(update.round_id)
    before = run.accepted.get((update.client_id, update.round_id))
    before = None if before is not None and before.is_lost else before
    is_forgotten = round_ is not None and round_.is_forgotten
    if not is_forgotten and before is not None and before.update.digest == update.digest:
        return Verdict.AGAIN, None
    if not run.is_open:
        return Verdict.NOT_HIS, RejectReason.RUN_ENDED
    if round_ is None:
        return Verdict.NOT_HIS, RejectReason.WRONG_ROUND
    if is_forgotten:
        return Verdict.NOT_HIS, RejectReason.TOO_LATE
    if update.client_id not in round_.fates:
        return Verdict.NOT_HIS, RejectReason.NOT_INVITED
    if update.client_id in round_.late_because:
        return Verdict.NOT_HIS, round_.late_because[update.client_id]
    if before is not None or round_.fates[update.client_id] is Fate.REFUSED:
        return Verdict.NOT_HIS, RejectReason.ALREADY_REPORTED
    fault = _fault(update, round_, rules.policy)
    if rules.policy.mode != "sync":
        return _verdict_of_buffer(update, run, rules, fault)
    if round_.is_collecting and (not round_.is_in_grace or round_.began_in_time(update.client_id)):
        return (Verdict.REFUSED, fault) if fault else (Verdict.ON_TIME, None)
    late = _too_late(update, round_, run, rules, fault)
    return (Verdict.LATE, late) if late else (Verdict.CARRIED, None)


def _fault(update: Update, round_: RoundFacts, policy: StragglerPolicy) -> RejectReason | None:
    faults = {
        RejectReason.WRONG_BASE: update.base_version != round_.base,
        RejectReason.NO_EXAMPLES: update.num_examples <= 0,
        RejectReason.TOO_MANY_EXAMPLES: update.num_examples > policy.max_examples,
        RejectReason.BAD_WORK: not (update.work > 0 and update.work <= 1),
        RejectReason.PARTIAL_WORK: policy.partial_work == "refuse" and update.work < 1,
    }
    return next((reason for reason, is_so in faults.items() if is_so), None)


def _too_late(
    update: Update, round_: RoundFacts, run: RunFacts, rules: RunRules, fault: RejectReason | None
) -> RejectReason | None:
    if rules.policy.late == "discard":
        return RejectReason.TOO_LATE
    counts_after_this_round = round_.is_collecting or (run.round is not None and run.round.is_aggregating)
    base_of_next = run.version + counts_after_this_round
    if base_of_next >= rules.rounds or run.is_stop_wanted:
        return RejectReason.TOO_LATE
    if fault is not None:
        return fault
    return RejectReason.TOO_STALE if base_of_next - update.base_version > rules.policy.max_staleness else None


def _verdict_of_buffer(
    update: Update, run: RunFacts, rules: RunRules, fault: RejectReason | None
) -> tuple[Verdict, RejectReason | None]:
    if fault is not None:
        return Verdict.REFUSED, fault
    late = _no_buffer_for(update, run, rules)
    return (Verdict.LATE, late) if late else (Verdict.ON_TIME, None)


def _no_buffer_for(update: Update, run: RunFacts, rules: RunRules) -> RejectReason | None:
    """Return the reason that no buffer of an asynchronous run can take an update; None: one can.

    A closed buffer commits before, and so does every full buffer of the updates that wait already.
    """
    size = rules.policy.buffer_size if rules.policy.mode == "fedbuff" else 1
    commits_before = 0
    if run.round is None or not run.round.is_collecting:
        commits_before = (run.round is not None) + len(run.waiting) // size
    counts_at = run.version + commits_before
    if counts_at >= rules.rounds or run.is_stop_wanted:
        return RejectReason.TOO_LATE
    if counts_at > update.base_version + rules.policy.max_staleness:
        return RejectReason.TOO_STALE
    twins = (a for (c, _), a in run.accepted.items() if c == update.client_id and not a.is_left)
    return RejectReason.ALREADY_REPORTED if any(a.update.base_version == update.base_version for a in twins) else None


def discount_of(age: int, policy: StragglerPolicy) -> float:
    """Compute the factor of an update that is `age` versions old."""
    if policy.staleness == "hinge":
        return 1 / (policy.hinge_slope * max(0, age - policy.hinge_delay) + 1)
    return 1.0 if policy.staleness == "constant" else math.exp(-policy.staleness_exponent * math.log1p(age))
