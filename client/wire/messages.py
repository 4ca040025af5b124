"""The conversion between control-stream messages and the session's values; malformed messages are rejected here."""

import logging
import math
from collections.abc import Iterable, Sequence

from atoll.client.policy.small_cells import StatisticsTerms, guarded
from atoll.client.session.events import (
    Asked,
    EvaluationRequest,
    Event,
    Invitation,
    Released,
    ReportEvaluation,
    ReportFailure,
    ReportStatistics,
    RunEnded,
    StatisticsRequest,
    Sums,
)
from atoll.ground import strict_json
from atoll.ground.printable import count_of
from atoll.ground.strict_json import ManifestError
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.disclosure import Disclosure, MetricsLeave
from atoll.protocol.manifest import ID_MAX
from atoll.protocol.secure.terms import read_terms
from atoll.protocol.site_statistics import BYTES_MAX, encode
from atoll.protocol.vocabulary import Digest, ReleaseReason, RoundId, RunId, Version
from atoll.protocol.wire.channel import PROTOCOL
from atoll.task.metrics import METRICS_MAX, SUMS_MAX
from atoll.tensors.codecs.names import FAMILIES, open_codec
from atoll.training.statistics.question import read_question

logger = logging.getLogger(__name__)

DETAIL_MAX = 2000
NUM_EXAMPLES_MAX = 2**53
SECONDS_MAX = 366 * 86400.0
RANGE_MAX = 200
"""Largest exponent of a tensor's range, up and down."""


class BadMessage(ValueError):
    """Error: a message of the coordinator is not valid; the text names the field, its value and the allowed ones."""


def hello(
    *,
    site: str,
    session: str,
    tasks: Iterable[str],
    num_examples: int,
    label: str,
    working_on: Iterable[tuple[RunId, RoundId]],
    software: str,
    codecs: Iterable[str] = FAMILIES,
) -> pb.Hello:
    """Make the first message of a session.

    Args:
        site: name of the client.
        session: name of the session, random and new for each.
        tasks: names of the tasks that this agent allows.
        num_examples: size of the site's training data; 0: not known.
        label: stratum of the client.
        working_on: rounds for which it trains or has an unanswered update.
        software: name and version of this program.
        codecs: families of codecs that its updates may use.
    """
    return pb.Hello(
        protocol=PROTOCOL,
        client_id=site,
        session=session,
        tasks=sorted(tasks),
        num_examples=min(num_examples, NUM_EXAMPLES_MAX),
        label=label,
        working_on=[pb.Work(run_id=run_id, round_id=round_id) for run_id, round_id in working_on],
        software=software,
        codecs=codecs,
        gives_statistics=True,
        spreads_parts=True,
        takes_messages=True,
    )


def event_of(message: pb.ServerMessage) -> Event | None:
    """Return the event of a message; None: the session does not need the message.

    Raises:
        BadMessage: the message is not valid.
    """
    try:
        match message.WhichOneof("message"):
            case "invite":
                return Asked(_invitation(message.invite))
            case "evaluate":
                return Asked(_evaluation_request(message.evaluate))
            case "ask_statistics":
                return Asked(_statistics_request(message.ask_statistics))
            case "release":
                return _released(message.release)
            case "run_ended":
                return RunEnded(_run(message.run_ended.run_id))
            case _:
                return None
    except ManifestError as error:  # raised by the readers of `strict_json`
        raise BadMessage(str(error)) from None


def _run(run_id: str) -> RunId:
    return RunId(strict_json.text(run_id, "run_id", num_max=ID_MAX))


def _released(release: pb.Release) -> Released:
    reason = strict_json.one_of(release.reason, "reason", allowed=set(ReleaseReason))
    return Released(_run(release.run_id), RoundId(release.round_id), ReleaseReason(reason), release.submit)


def _invitation(invite: pb.Invite) -> Invitation:
    return Invitation(
        run_id=_run(invite.run_id),
        round_id=RoundId(strict_json.integer(invite.round_id, "round_id", low=0, high=strict_json.INT64_MAX)),
        task=invite.task,
        base_version=Version(
            strict_json.integer(invite.base_version, "base_version", low=0, high=strict_json.INT64_MAX)
        ),
        model_digest=Digest(strict_json.sha256_hex(invite.model_digest, "model_digest")),
        time_left=_seconds(invite.time_left_s),
        seed=invite.seed,
        local=invite.local or "{}",
        data=invite.data,
        manifest=invite.manifest,
        algorithm=invite.algorithm or "fedavg",
        codec=_codec(invite.codec),
        rank=invite.rank,
        spreads=invite.spreads,
        counted_round=RoundId(
            strict_json.integer(invite.counted_round, "counted_round", low=0, high=strict_json.INT64_MAX)
        ),
        model_seed=invite.model_seed,
        message=strict_json.text(invite.message, "message", num_max=ID_MAX) if invite.message else "",
        group=strict_json.text(invite.group, "group", num_max=ID_MAX) if invite.group else "",
        run_number=invite.run_number,
        asked_at=_instant(invite.asked_at),
        secure=read_terms(invite.secure.terms) if invite.HasField("secure") else None,
        ranges=_ranges(invite.secure.ranges),
    )


def _ranges(exponents: Sequence[int]) -> tuple[int, ...]:
    for exponent in exponents:
        strict_json.integer(exponent, "secure.ranges", low=-RANGE_MAX, high=RANGE_MAX)
    return tuple(exponents)


def _evaluation_request(evaluate: pb.Evaluate) -> EvaluationRequest:
    return EvaluationRequest(
        run_id=_run(evaluate.run_id),
        version=Version(evaluate.version),
        task=evaluate.task,
        model_digest=Digest(strict_json.sha256_hex(evaluate.model_digest, "model_digest")),
        time_left=_seconds(evaluate.time_left_s),
        manifest=evaluate.manifest,
        local=evaluate.local or "{}",
        counted_round=RoundId(
            strict_json.integer(evaluate.counted_round, "counted_round", low=0, high=strict_json.INT64_MAX)
        ),
        model_seed=evaluate.model_seed,
        run_number=evaluate.run_number,
        asked_at=_instant(evaluate.asked_at),
        secure=read_terms(evaluate.secure.terms) if evaluate.HasField("secure") else None,
    )


def _statistics_request(asked: pb.AskStatistics) -> StatisticsRequest:
    return StatisticsRequest(
        run_id=_run(asked.run_id),
        number=strict_json.integer(asked.number, "number", low=0, high=strict_json.INT64_MAX),
        task=asked.task,
        time_left=_seconds(asked.time_left_s),
        local=asked.local or "{}",
        model_seed=asked.model_seed,
        secure=read_terms(asked.secure.terms) if asked.HasField("secure") else None,
        question=read_question(asked.question.encode()) if asked.HasField("secure") else None,
    )


def _codec(name: str) -> str:
    """Return the requested codec; plain, which the coordinator always accepts, if this agent does not know it."""
    try:
        return open_codec(name).name if name else ""
    except ValueError as error:
        logger.warning("the update will be sent without a codec: %s", error)
        return ""


def _seconds(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise BadMessage(f"time_left_s: got {value}; allowed: a finite number >= 0")
    return min(value, SECONDS_MAX)


def _instant(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise BadMessage(f"asked_at: got {value}; allowed: a finite number >= 0")
    return value


def _plain(detail: str) -> str:
    """Return the last DETAIL_MAX characters of a detail as valid UTF-8, which a file name in it may break."""
    return detail[-DETAIL_MAX:].encode(errors="replace").decode()


def ready() -> pb.ClientMessage:
    """Make the message that declined work may be offered to this client again."""
    return pb.ClientMessage(ready=pb.Ready())


def failure(effect: ReportFailure) -> pb.ClientMessage:
    """Make the message that this client gives up on a round."""
    return pb.ClientMessage(
        failed=pb.Failed(
            run_id=effect.run_id,
            round_id=effect.round_id,
            reason=effect.reason,
            detail=_plain(effect.detail),
            waits=effect.waits,
        )
    )


def evaluation(effect: ReportEvaluation, disclosure: Disclosure) -> pb.ClientMessage:
    """Make the message with the sums of an evaluation, or the reason why there are none."""
    sums, error = effect.statistics, ""
    if sums is not None and disclosure.metrics is MetricsLeave.NONE:  # the policy may have changed
        sums, error = None, "no metrics leave this site"
    elif sums is None:
        error = _plain(effect.detail) or "no test data here"
    elif fault := too_many(sums):
        sums, error = None, fault
    return pb.ClientMessage(
        evaluated=pb.Evaluated(
            run_id=effect.run_id,
            version=effect.version,
            statistics=statistics(sums or {}),
            error=error,
            reason=effect.reason or "",
            metrics=disclosure.metrics,
            min_sites=disclosure.min_sites,
        )
    )


def site_statistics(effect: ReportStatistics, terms: StatisticsTerms) -> pb.ClientMessage:
    """Make the message with the statistics that may leave the site, or the reason why there are none."""
    found, error, data = effect.statistics, _plain(effect.detail), b""
    if found is not None and terms.disclosure.metrics is MetricsLeave.NONE:  # the policy may have changed
        error = "no statistics leave this site"
    elif found is not None:
        data = encode(guarded(found, terms))
        if len(data) > BYTES_MAX:
            error, data = f"{count_of(len(data), 'byte')} of statistics; allowed: at most {BYTES_MAX}", b""
    return pb.ClientMessage(
        give_statistics=pb.GiveStatistics(
            run_id=effect.run_id,
            number=effect.number,
            statistics=data,
            error=error,
            reason=effect.reason or "",
            leave=terms.disclosure.metrics,
            min_sites=terms.disclosure.min_sites,
        )
    )


def statistics(sums: Sums) -> dict[str, pb.Statistics]:
    """Return sufficient statistics in the protocol's format."""
    return {_plain(name): pb.Statistics(values=values) for name, values in sums.items()}


def too_many(sums: Sums) -> str:
    """Return the reason why there are too many sums to send; empty if there are not."""
    count = sum(map(len, sums.values()))
    if len(sums) <= METRICS_MAX and count <= SUMS_MAX:
        return ""
    return (
        f"{count_of(len(sums), 'metric')} of {count_of(count, 'sum')}; allowed: at most "
        f"{METRICS_MAX} of {SUMS_MAX} together"
    )
