"""Effects of the run's machine -> messages of the control stream: each conversion once."""

import hashlib
import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import ClientId, Digest, RoundId, RunId, RunState
from atoll.protocol.wire.channel import METRICS_MAX, STATISTICS_MAX
from atoll.server.rounds.events import AskEvaluation, Invite, Release, Sums

NAME_MAX = 200
"""Characters of a name that a client gives itself, its session, its stratum, a task or a metric."""

INLINE_MANIFEST_BYTES_MAX = 64 * 1024
"""A manifest up to this size rides in the invitation and saves the client a round trip."""


def training_seed(seed: int, run_name: str, round_id: RoundId, client_id: ClientId) -> int:
    """63 bits that depend on (run, round, client) alone, so that a client that trains again gets the same bits."""
    text = f"[{seed}, {quoted(run_name)}, {round_id}, {quoted(client_id)}]"  # JSON, a third of the time of `dumps`
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def invitation(
    effect: Invite,
    *,
    run_id: RunId,
    task: str,
    digest: Digest,
    manifest: bytes,
    data: bytes = b"",
    seed: int,
    local: Mapping[str, Any],
    algorithm: str,
    codec: str,
    rank: int = 0,
    model_seed: int,
    grace: float,
    now: float,
) -> pb.ServerMessage:
    """Train from this version; the deadline travels as time left, because clocks differ."""
    return pb.ServerMessage(
        invite=pb.Invite(
            run_id=run_id,
            round_id=effect.round_id,
            task=task,
            base_version=effect.base_version,
            model_digest=digest,
            time_left_s=max(0.0, effect.deadline - now),
            seed=seed,
            local=json.dumps(local, sort_keys=True),
            grace_s=grace,
            manifest=_inline(manifest),
            data=data,
            algorithm=algorithm,
            codec=codec,
            rank=rank,
            counted_round=effect.counted_round,
            model_seed=model_seed,
        )
    )


def evaluation_request(
    effect: AskEvaluation,
    *,
    run_id: RunId,
    task: str,
    digest: Digest,
    manifest: bytes,
    local: Mapping[str, Any],
    model_seed: int,
    now: float,
) -> pb.ServerMessage:
    """Run this version on your own data."""
    return pb.ServerMessage(
        evaluate=pb.Evaluate(
            run_id=run_id,
            task=task,
            version=effect.version,
            model_digest=digest,
            time_left_s=max(0.0, effect.deadline - now),
            manifest=_inline(manifest),
            local=json.dumps(local, sort_keys=True),
            counted_round=effect.counted_round,
            model_seed=model_seed,
        )
    )


def release(effect: Release, *, run_id: RunId) -> pb.ServerMessage:
    """Stop training for this round."""
    return pb.ServerMessage(
        release=pb.Release(run_id=run_id, round_id=effect.round_id, reason=effect.reason, submit=effect.submit)
    )


def run_ended(run_id: RunId, state: RunState, cause: str, num_open: int) -> pb.ServerMessage:
    """Nothing more comes of this run."""
    return pb.ServerMessage(run_ended=pb.RunEnded(run_id=run_id, state=state, cause=cause, num_open=num_open))


def sums_of(statistics: Mapping[str, pb.Statistics]) -> Sums | None:
    """Sufficient statistics as they came over the wire; None when they are more than anybody would look at."""
    num_values = sum(len(value.values) for value in statistics.values())
    if len(statistics) > METRICS_MAX or num_values > STATISTICS_MAX or any(len(n) > NAME_MAX for n in statistics):
        return None
    return {name: tuple(value.values) for name, value in sorted(statistics.items())}


def _inline(manifest: bytes) -> bytes:
    return manifest if len(manifest) <= INLINE_MANIFEST_BYTES_MAX else b""
