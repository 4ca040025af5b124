"""The terms of a run's secure sums, from its settings and the place of a sum in its round. Pure."""

import json
import math
from dataclasses import dataclass, replace

from atoll.protocol.secure.privacy_terms import PrivacyTerms
from atoll.protocol.secure.session_size import TWO_THIRDS
from atoll.protocol.secure.terms import Terms, data_digest, ranges_digest
from atoll.protocol.vocabulary import Digest, RoundId, RunId, Version
from atoll.server.config.run import RunConfig
from atoll.server.rounds.privacy_rules import SharedExampleRules, SharedRules
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.rounds.session_events import SumPlace
from atoll.task.given import OPTION
from atoll.tensors.layout import Layout
from atoll.tensors.secure.masked_layout import layout_digest
from atoll.tensors.secure.vector import fault_of
from atoll.training.statistics.question import Question


@dataclass(frozen=True, slots=True)
class SumBase:
    """Version from which the members of a sum train, and the receivers of their updates."""

    version: Version
    digest: Digest
    """The digest of its manifest."""
    layout: Layout
    receivers: tuple[int, ...] = ()
    """Aggregation ranks that get parts of the updates; empty: the coordinator gets them."""


def terms_of(
    config: RunConfig,
    *,
    run_id: RunId,
    task: str,
    round_id: RoundId,
    place: SumPlace,
    base: SumBase,
) -> Terms:
    """Return the terms of one sum of updates.

    Args:
        config: the settings of the run, with `[secure]`.
        run_id: the run.
        task: its name, as in its invitations.
        round_id: the round.
        place: the session, its attempt, and the exponents of the ranges.
        base: what the members train from, and where their updates go.
    """
    rules = _rules(config)
    return replace(
        _of_numbers(config, run_id, task, place),
        round=round_id,
        purpose="update",
        base=base.version,
        model=base.digest,
        frozen=config.model.frozen,
        algorithm=config.aggregation.training,
        layout=layout_digest(base.layout, rules.metrics),
        bits=rules.bits,
        clip_norm=rules.clip_norm,
        examples_max=rules.examples_max,
        ranges=ranges_digest(place.ranges),
        members_max=members_max(rules),
        threshold=rules.threshold,
        privacy="" if (privacy := privacy_terms(config)) is None else privacy.text(),
        receivers=tuple(sorted(base.receivers)),
        metrics=rules.metrics,
    )


def terms_of_evaluation(
    config: RunConfig, *, run_id: RunId, task: str, version: Version, model: Digest, place: SumPlace
) -> Terms:
    """Return the terms of one sum of the metrics of an evaluation.

    Args:
        config: the settings of the run, with `[secure]`.
        run_id: the run.
        task: its name, as in its requests.
        version: that is evaluated.
        model: the digest of its manifest.
        place: the session and its attempt.
    """
    metrics = _rules(config).metrics
    return replace(
        _of_numbers(config, run_id, task, place),
        round=version,
        purpose="evaluation",
        base=version,
        model=model,
        frozen=config.model.frozen,
        layout=layout_digest((), metrics),
        metrics=metrics,
    )


def terms_of_statistics(
    config: RunConfig, *, run_id: RunId, task: str, number: int, question: Question, place: SumPlace
) -> Terms:
    """Return the terms of the sum of statistics.

    Args:
        config: the settings of the planned run, with `[secure]`.
        run_id: the name of the requests for this planned run.
        task: its name, as in the request.
        number: of the request.
        question: the layout of the sum's numbers.
        place: the session and its attempt.
    """
    return replace(
        _of_numbers(config, run_id, task, place),
        round=number,
        purpose="statistics",
        model=data_digest(task),
        local=options_text(config),
        layout=question.digest,
    )


def _of_numbers(config: RunConfig, run_id: RunId, task: str, place: SumPlace) -> Terms:
    """Return the frame of all terms: those of a sum without tensors, which each purpose completes.

    Word size and clip norm then have values that change no number, and a session opens with two thirds of its members,
    whatever the run has as the threshold of its cohorts.
    """
    return Terms(
        run=run_id,
        round=0,
        attempt=place.attempt,
        session=place.session,
        purpose="update",
        base=0,
        model="",
        frozen="",
        task=task,
        algorithm="",
        local=config.local_text,
        layout="",
        bits=64,
        clip_norm=1.0,
        examples_max=0,
        ranges=ranges_digest(()),
        members_max=_rules(config).session_max,
        threshold=TWO_THIRDS,
        privacy="",
        receivers=(),
    )


def privacy_terms(config: RunConfig) -> PrivacyTerms | None:
    """Return the privacy of a run's secure sums; None: they are not private."""
    rules = config.rules.privacy
    if rules is None or rules.noise_by == "site":
        return None  # a guarantee for examples, whose terms the sites get with the values for the task
    shared = rules if isinstance(rules, SharedRules | SharedExampleRules) else None
    assert config.privacy is not None
    return PrivacyTerms(
        unit=config.privacy.unit,
        noise_by=rules.noise_by,
        epsilon=rules.epsilon,
        delta=rules.delta,
        noise_multiplier=config.privacy.multiplier_of_sum(config.rounds, config.round.cohort_size),
        participations_max=rules.participations_max,
        divisor=config.round.cohort_size,
        honest_min=0 if shared is None else shared.honest_min,
        colluders=0 if shared is None else shared.colluders,
    )


def _rules(config: RunConfig) -> SecureRules:
    rules = config.secure_rules
    assert rules is not None
    return rules


def requests_of(config: RunConfig) -> str:
    """Return the name under which sites know the requests for statistics before a planned run."""
    return f"{config.name}-statistics"


def options_text(config: RunConfig) -> str:
    """Return the options of a planned run's task as JSON, as a request for statistics has them."""
    options = {key: value for key, value in config.given.items() if key.startswith(OPTION)}
    return json.dumps(options, sort_keys=True)


def members_max(rules: SecureRules) -> int:
    """Return the most members of a session: of its rules, and of those that the words of its sum can add."""

    def fits(members: int) -> bool:
        return not fault_of(rules.bits, members, 10.0 * rules.share * math.sqrt(members))

    return next(members for members in range(rules.session_max, 0, -1) if fits(members))
