"""What the audit log has to say of a run's effects. Pure."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from atoll.protocol.vocabulary import Digest, RunId
from atoll.server.audit.actions import Action
from atoll.server.rounds.events import Abandon, Commit, Effect, EndRun


class Said(NamedTuple):
    """The arguments of `AuditLog.say`."""

    action: Action
    object_: str
    outcome: str
    digests: Mapping[str, str]


def said_of(run_id: RunId, effects: Iterable[Effect]) -> Iterator[Said]:
    """One line for each round that ended, and for the end of the run."""
    for effect in effects:
        match effect:
            case Commit(round_id, version, model_digest, used):
                what = f"version {version} of {len(used)} updates"
                digests = {"model": model_digest, "updates": digest_of_updates(used)}
                yield Said(Action.ROUND_COMMIT, f"{run_id} round {round_id}", what, digests)
            case Abandon(round_id, reason):
                yield Said(Action.ROUND_ABANDON, f"{run_id} round {round_id}", str(reason), {})
            case EndRun(state, cause):
                yield Said(Action.RUN_END, run_id, f"{state}: {cause}", {})
            case _:
                pass


def digest_of_updates(used: Iterable[Digest]) -> str:
    """SHA-256 over the digests [hex] of a round's updates, in their own order, each with a line's end."""
    return hashlib.sha256("".join(f"{digest}\n" for digest in sorted(used)).encode()).hexdigest()
