"""What makes two trainings of one round the same work. Pure.

An agent that comes back, and a coordinator that replays its journal, say the same again; whoever changes a word of it
asks for another training.
"""

import hashlib
import json

from atoll.client.session.events import Invitation


def content_of(invitation: Invitation) -> str:
    """SHA-256 of everything in an invitation that the update depends on.

    Left out are the names that stand beside it (run, round), the time that is left, and the rank to which the update
    goes, which is another one when a rank is away.
    """
    said = {
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
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
