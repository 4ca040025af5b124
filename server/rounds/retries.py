"""The waits after failures: of a run before it repeats a round, and of a client before it is invited again. Pure.

Both are `protocol.backoff.delay` with a jitter from the run's seed, so that a replay of the journal has the same waits.
"""

import random

from atoll.ground.backoff import delay
from atoll.protocol.vocabulary import AbandonReason, ClientId, RoundId
from atoll.server.members.membership import Membership
from atoll.server.rounds.policy import StragglerPolicy

COSTS_NO_RETRY = (
    AbandonReason.PAUSE_REQUESTED,
    AbandonReason.AWAITS_APPROVAL,
    AbandonReason.AWAITS_CLIENTS,
    AbandonReason.AWAITS_ROOM,
    AbandonReason.FILES_LOST,
    AbandonReason.RESTORED,
)
"""Reasons of an abandonment that does not count as a failure of the round."""


def seconds_to_retry(policy: StragglerPolicy, *, failures: int, seed: int, round_id: RoundId) -> float:
    """Return the wait before an abandoned round is repeated [s].

        wait = u min(retry_wait_max, retry_wait 2^(failures - 1)),    u uniform in [1/2, 1)

    Args:
        policy: the policy of the run.
        failures: the number of consecutive abandoned rounds, from 1.
        seed: the seed of the run.
        round_id: the abandoned round.
    """
    rng = random.Random(f"retry {seed} {round_id}")
    return delay(failures - 1, policy.retry_wait, policy.retry_wait_max, rng)


def let_rest(membership: Membership, policy: StragglerPolicy, seed: int, client_id: ClientId, now: float) -> float:
    """Count a client's failure, and exclude it from invitations for a while; return its rest [s]."""
    failures = membership.failures(client_id) + 1
    rest = seconds_of_rest(policy, failures=failures, seed=seed, client_id=client_id)
    membership.failed(client_id, now + rest if rest else 0.0)
    return rest


def seconds_of_rest(policy: StragglerPolicy, *, failures: int, seed: int, client_id: ClientId) -> float:
    """Return the rest of a client after its failure [s]: like `seconds_to_retry`, with `failure_rest`.

    Args:
        policy: the policy of the run.
        failures: the number of the client's consecutive failures, from 1.
        seed: the seed of the run.
        client_id: the client.
    """
    rng = random.Random(f"rest {seed} {client_id} {failures}")
    return delay(failures - 1, policy.failure_rest, policy.failure_rest_max, rng)
