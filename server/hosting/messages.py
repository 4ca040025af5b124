"""The messages of the control stream, made from the effects of a run's machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.vocabulary import Digest, RunId, RunState
from atoll.server.config.run import RunConfig
from atoll.server.rounds.events import AskEvaluation, Invite, Release, Sums
from atoll.task.metrics import METRICS_MAX, SUMS_MAX

NAME_MAX = 200
"""Largest length of a name that a client gives: itself, its session, its stratum, a task, a metric [characters]."""

NOTICE_MAX = 1000
"""Largest length of a notice for the operator of a site [characters]."""

INLINE_MANIFEST_BYTES_MAX = 64 * 1024
"""Largest manifest that is inlined in an invitation, which saves the client a round trip [bytes]."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Part of the messages that is the same for all rounds and clients of a run."""

    run_id: RunId
    task: str
    """The task's name, as the sites' policies list it."""
    local: str
    """The settings of local training [JSON object]."""
    algorithm: str
    model_seed: int
    """The seed of the initial model."""
    grace: float
    """Time after a deadline within which an upload that began before it may end [s]."""
    run_number: int = 0
    """The number of the run, for apps (`atoll.task.apps`)."""

    @classmethod
    def of(cls, run_id: RunId, task: str, config: RunConfig, run_number: int = 0) -> "RunTerms":
        """Collect the part of a run's messages that is the same for all rounds and clients, from its settings."""
        training, grace = config.aggregation.training, config.round.grace
        return cls(run_id, task, config.local_text, training, config.seed, grace, run_number)


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """Version of the global model that a message is about."""

    digest: Digest
    manifest: bytes
    data: bytes = b""
    """Bytes of a small model, which saves the client a download; empty for larger ones."""


@dataclass(frozen=True, slots=True)
class ClientTerms:
    """Part of an invitation that belongs to one client in one round."""

    seed: int
    """The seed of the client's training (`training_seed`)."""
    codec: str = ""
    """The codec of the client's update; empty: plain values."""
    rank: int = 0
    """The aggregation rank that receives the client's update."""
    spreads: bool = False
    """Whether the parts of the client's update go to this rank and the following ones, in turn."""


def invitation(
    effect: Invite,
    terms: RunTerms,
    model: OfferedModel,
    client: ClientTerms,
    *,
    now: float,
    secure: pb.SecureTerms | None = None,
) -> pb.ServerMessage:
    """Make the order to train from a version. The deadline is sent as time left, because clocks differ.

    Args:
        effect: the machine's decision to invite.
        terms: the part of the message that is the same for the run.
        model: the version to train from.
        client: the part of the message that belongs to this client.
        now: the time on the clock of `effect.deadline` [s].
        secure: the terms of the secure sum that the update is for; None: the update is plain.
    """
    return pb.ServerMessage(
        invite=pb.Invite(
            secure=secure,
            run_id=terms.run_id,
            round_id=effect.round_id,
            task=terms.task,
            base_version=effect.base_version,
            model_digest=model.digest,
            time_left_s=max(0.0, effect.deadline - now),
            seed=client.seed,
            local=terms.local,
            grace_s=terms.grace,
            manifest=inline(model.manifest),
            data=model.data,
            algorithm=terms.algorithm,
            codec=client.codec,
            rank=client.rank,
            spreads=client.spreads,
            counted_round=effect.counted_round,
            model_seed=terms.model_seed,
            run_number=terms.run_number,
            asked_at=effect.asked_at,
        )
    )


def evaluation_request(
    effect: AskEvaluation, terms: RunTerms, model: OfferedModel, *, now: float, secure: pb.SecureTerms | None = None
) -> pb.ServerMessage:
    """Make the order to evaluate a version on the client's data; see `invitation` for the arguments."""
    return pb.ServerMessage(
        evaluate=pb.Evaluate(
            secure=secure,
            run_id=terms.run_id,
            task=terms.task,
            version=effect.version,
            model_digest=model.digest,
            time_left_s=max(0.0, effect.deadline - now),
            manifest=inline(model.manifest),
            local=terms.local,
            counted_round=effect.counted_round,
            model_seed=terms.model_seed,
            run_number=terms.run_number,
            asked_at=effect.asked_at,
        )
    )


def release(effect: Release, *, run_id: RunId) -> pb.ServerMessage:
    """Make the order to stop training for a round."""
    return pb.ServerMessage(
        release=pb.Release(run_id=run_id, round_id=effect.round_id, reason=effect.reason, submit=effect.submit)
    )


def run_ended(run_id: RunId, state: RunState, cause: str, num_open: int) -> pb.ServerMessage:
    """Make the notice that a run has ended.

    Args:
        run_id: the run.
        state: the state in which it ended.
        cause: the reason, in words.
        num_open: the number of other runs for which the client may still work.
    """
    return pb.ServerMessage(run_ended=pb.RunEnded(run_id=run_id, state=state, cause=cause, num_open=num_open))


def notice(text: str) -> pb.ServerMessage:
    """Make a notice for the operator of a site."""
    return pb.ServerMessage(notice=pb.Notice(text=text[:NOTICE_MAX]))


def sums_of(statistics: Mapping[str, pb.Statistics]) -> Sums | None:
    """Read sufficient statistics from the wire; return None if there are too many or a name is not valid."""
    num_values = sum(len(value.values) for value in statistics.values())
    if len(statistics) > METRICS_MAX or num_values > SUMS_MAX or not all(map(_is_metric, statistics)):
        return None
    return {name: tuple(value.values) for name, value in sorted(statistics.items())}


def _is_metric(name: str) -> bool:
    return 0 < len(name) <= NAME_MAX and name.isprintable()


def inline(manifest: bytes) -> bytes:
    """Return a manifest if it is small enough for a message; empty: the client downloads it."""
    return manifest if len(manifest) <= INLINE_MANIFEST_BYTES_MAX else b""
