"""What the policy says about one update, read independently of the machines."""

import math
from enum import Enum, auto

from atoll.protocol.vocabulary import Fate, RejectReason
from atoll.server.rounds.events import Update
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.update_intake import RunRules
from atoll.simulations.histories.facts import Books, RoundFacts


class Verdict(Enum):
    """What becomes of an update."""

    ON_TIME = auto()
    CARRIED = auto()
    AGAIN = auto()  # accepted before; only the answer was lost
    LATE = auto()  # refused because it comes too late
    REFUSED = auto()  # refused for what it claims; its client had its chance in this round
    NOT_HIS = auto()  # refused, and nothing changes


def verdict_on(update: Update, books: Books, rules: RunRules) -> tuple[Verdict, RejectReason | None]:
    """The verdict, and why if it is no acceptance."""
    round_ = books.rounds.get(update.round_id)
    before = books.accepted.get((update.client_id, update.round_id))
    is_forgotten = round_ is not None and round_.is_forgotten
    if not is_forgotten and before is not None and before.update.digest == update.digest:
        return Verdict.AGAIN, None
    if not books.is_open:
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
        return _on_its_way_into_a_buffer(update, books, rules, fault)
    if round_.is_collecting and (not round_.is_in_grace or round_.began_in_time(update.client_id)):
        return (Verdict.REFUSED, fault) if fault else (Verdict.ON_TIME, None)
    late = _too_late(update, round_, books, rules, fault)
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
    update: Update, round_: RoundFacts, books: Books, rules: RunRules, fault: RejectReason | None
) -> RejectReason | None:
    if rules.policy.late == "discard":
        return RejectReason.TOO_LATE
    counts_after_this_round = round_.is_collecting or (books.round is not None and books.round.is_aggregating)
    base_of_next = books.version + counts_after_this_round
    if base_of_next >= rules.rounds or books.is_stop_wanted:
        return RejectReason.TOO_LATE
    if fault is not None:
        return fault
    return RejectReason.TOO_STALE if base_of_next - update.base_version > rules.policy.max_staleness else None


def _on_its_way_into_a_buffer(
    update: Update, books: Books, rules: RunRules, fault: RejectReason | None
) -> tuple[Verdict, RejectReason | None]:
    if fault is not None:
        return Verdict.REFUSED, fault
    late = _no_buffer_for(update, books, rules)
    return (Verdict.LATE, late) if late else (Verdict.ON_TIME, None)


def _no_buffer_for(update: Update, books: Books, rules: RunRules) -> RejectReason | None:
    """Why an update can be in no buffer of an asynchronous run. One that is closed commits first, and so does every
    whole buffer of those that wait already."""
    size = rules.policy.buffer_size if rules.policy.mode == "fedbuff" else 1
    commits_before = 0
    if books.round is None or not books.round.is_collecting:
        commits_before = (books.round is not None) + len(books.waiting) // size
    counts_at = books.version + commits_before
    if counts_at >= rules.rounds or books.is_stop_wanted:
        return RejectReason.TOO_LATE
    if counts_at > update.base_version + rules.policy.max_staleness:
        return RejectReason.TOO_STALE
    twins = (a for (c, _), a in books.accepted.items() if c == update.client_id and not a.is_left)
    return RejectReason.ALREADY_REPORTED if any(a.update.base_version == update.base_version for a in twins) else None


def discount_of(age: int, policy: StragglerPolicy) -> float:
    """The share of an update that is so many versions old."""
    if policy.staleness == "hinge":
        return 1 / (policy.hinge_slope * max(0, age - policy.hinge_delay) + 1)
    return 1.0 if policy.staleness == "constant" else math.exp(-policy.staleness_exponent * math.log1p(age))
