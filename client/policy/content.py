"""The identity of a training: two trainings of one round with equal content are the same work. Pure.

A reconnecting agent and a coordinator that replays its journal repeat the same content; changed content is another
training.
"""

import hashlib
import json

from atoll.client.session.events import Invitation


def content_of(invitation: Invitation) -> str:
    """Return the SHA-256 of all fields of an invitation that the update depends on.

    It excludes the run and the round, which are compared separately; the remaining time and the instant of the first
    invitation; and the aggregation rank, which changes when a rank is away.
    """
    content = {
        "task": invitation.task,
        "base_version": invitation.base_version,
        "model_digest": invitation.model_digest,
        "seed": invitation.seed,
        "local": invitation.local,
        "algorithm": invitation.algorithm,
        "codec": invitation.codec,
        "counted_round": invitation.counted_round,
        "model_seed": invitation.model_seed,
    }
    if invitation.message:
        content |= {"message": invitation.message, "group": invitation.group}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
