"""The claims of an update: their check, and their entry into the records. Pure."""

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import ClientId, RejectReason, Version
from atoll.server.members.membership import Membership
from atoll.server.rounds.events import Reject, Update
from atoll.server.rounds.oort_utility import loss_and_utility
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.record import ClientRecord
from atoll.tensors.updates.weight import WEIGHT_MIN

WORK_MIN = 1e-9
"""Smallest claimed work: with less, the weight of the update could vanish in a product."""


def most_claimed(membership: Membership, client_id: ClientId, policy: StragglerPolicy) -> int:
    """Return the largest weight or count that a client may claim: min(n x `max_units`, `max_examples`).

    n is the number of examples with which it joined.
    """
    member = membership.members.get(client_id)
    joined = member.profile.num_examples if member else 0
    return min(joined * policy.max_units, policy.max_examples) if joined else policy.max_examples


def why_most(most: int, policy: StragglerPolicy) -> str:
    """Return the reason of a limit below `max_examples`, for the end of a sentence."""
    if most == policy.max_examples:
        return ""
    return f": it joined with {count_of(most // policy.max_units, 'example')}, and max_units is {policy.max_units}"


def fault_of(
    update: Update, *, base_version: Version, policy: StragglerPolicy, membership: Membership
) -> tuple[RejectReason, str] | None:
    """Return the fault of an update's claims, regardless of its arrival, or None."""
    if update.base_version != base_version:
        return RejectReason.WRONG_BASE, f"trained from version {update.base_version}, not {base_version}"
    most = most_claimed(membership, update.client_id, policy)
    if not WEIGHT_MIN <= update.num_examples <= most:
        is_less = update.num_examples < WEIGHT_MIN
        fault = f"num_examples {update.num_examples} is not in {WEIGHT_MIN:g}..{most}{why_most(most, policy)}"
        return RejectReason.NO_EXAMPLES if is_less else RejectReason.TOO_MANY_EXAMPLES, fault
    if not WORK_MIN <= update.work <= 1:
        return RejectReason.BAD_WORK, f"work {update.work} is not in (0, 1] (at least {WORK_MIN})"
    if update.work < 1 and policy.partial_work == "refuse":
        return RejectReason.PARTIAL_WORK, f"work {update.work:.3f} is less than 1 and partial_work is refuse"
    return None


def work_scale(work: float, policy: StragglerPolicy) -> float:
    """Return the factor of an update's weight for its fraction of the requested work, in (0, 1]."""
    return work if policy.partial_work == "scaled" else 1.0


def note_accepted(client: ClientRecord, update: Update) -> None:
    """Write an accepted update's claims into the client's record."""
    client.digest, client.num_examples, client.work = update.digest, update.num_examples, update.work
    client.is_lost, client.unused_because = False, ""
    client.num_bytes, client.plain_bytes = update.num_bytes, update.plain_bytes
    client.mesh, client.steps = update.mesh, update.steps
    client.download_seconds, client.train_seconds = update.download_seconds, update.train_seconds


def learn(membership: Membership, update: Update) -> None:
    """Record the loss and the utility of an accepted update, in time or late, for the sampler."""
    membership.learnt(update.client_id, update.round_id, *loss_and_utility(update))


def measure(membership: Membership, client: ClientRecord, update: Update, now: float) -> None:
    """Record the times that the client of an accepted update needed, for adaptive deadlines."""
    membership.measured(
        update.client_id,
        download=max(0.0, update.download_seconds),
        train=max(0.0, update.train_seconds) / update.work,
        upload=now - (client.upload_begun_at or now),
    )


def reject(update: Update, reason: RejectReason, detail: str) -> Reject:
    """Return the answer to an update that does not count."""
    return Reject(update.client_id, update.round_id, update.digest, reason, detail)
