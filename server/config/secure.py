"""The settings of secure sums, and what does not go with them: each fault says the value, what is allowed, and why."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.ground.printable import count_of
from atoll.protocol.secure.session_size import (
    ATTEMPTS_MAX,
    BYTES_MAX,
    MEMBERS_MAX,
    MEMBERS_MIN,
    SESSION_MAX_LEAST,
    TEXT_MAX,
    TWO_THIRDS,
)
from atoll.protocol.settings import STRICT
from atoll.server.config.aggregation import AggregationConfig
from atoll.server.config.exclusion import excluded, shown
from atoll.server.config.model import ModelConfig, StopConfig
from atoll.server.rounds.policy import Seconds, StragglerPolicy
from atoll.server.rounds.secure_rules import Bits, SecureRules
from atoll.tensors.layout import BESIDE, Layout
from atoll.tensors.secure.masked_layout import SUMS_MAX, in_metric_order
from atoll.training.statistics.parts import LABELS_MAX
from atoll.training.statistics.question import Question, faults_of

LOSS = {"loss": 2}
"""The metric that every training has: its total, and the number of examples."""

_OF_OTHER_TERMS = 8192
"""Largest part of the terms that no setting makes longer [bytes]."""

WITHOUT_CERTIFICATES = (
    "secure: this coordinator is --insecure, and the keys of a secure sum need certificates; allowed: a coordinator "
    "without --insecure"
)
"""The fault of a run with secure sums at a coordinator without an authority."""

NO_LAYOUT = (
    "secure.statistics: missing, and statistics before a run with [secure] are added in a secure sum, whose numbers "
    "are named before any site works: allowed is a table [secure.statistics] with labels, or features and their edges, "
    "or a plan without [secure], of which each site's policy decides"
)
"""The fault of a request for statistics before a run with secure sums that names no layout."""

_OF_SINGLE_SITES = {
    "min",
    "max",
    "minimum",
    "maximum",
    "extremes",
    "median",
    "quantiles",
    "percentiles",
    "per_site",
    "own",
}
"""What only the numbers of single sites, or of single examples, would tell."""

OF_SESSIONS = ("median", "trimmed_mean")
"""Rules that may reduce the means of sessions, element by element."""

SESSIONS_OF_A_RULE = 3
"""Least number of session means that such a rule reduces."""

_SEES_SITES = {
    "weighted": "it needs the size of each client's data",
    "power_of_choice": "it needs the loss of each client",
    "oort": "it needs the loss of each client",
}
"""Samplers that need a value of a single client."""


_fault = partial(excluded, "secure")


class SecureStatistics(BaseModel, **STRICT):
    """Layout of the statistics before the run (`atoll run statistics`), which are added in one secure sum."""

    splits: list[Literal["train", "test"]] = ["train"]
    """Splits of the data whose statistics are added."""

    labels: dict[str, Annotated[int, Field(ge=1, le=LABELS_MAX)]] = {}
    """Targets of whole numbers by name (`target`, or its key), each with the number of classes k: the occurrences of
    each label from 0 to k - 1, and of all others together, are counted."""

    targets: dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]] = {}
    """Float targets by name, each with the edges of its bins, as of `features`."""

    features: dict[str, list[Annotated[float, Field(allow_inf_nan=False)]]] = {}
    """Features by name, each with the edges of its bins: at least two, ascending. Values from the first edge to the
    last are counted by bin and are in the moments; values beyond them are counted as outside."""

    sites: list[str] = []
    """Sites of the sums: all of a session must take part. Empty: those of the newest sums of the task's statistics, or
    of the first ones all sites that are connected."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_single_sites(cls, given: object) -> object:
        if isinstance(given, dict) and (found := sorted(_OF_SINGLE_SITES & {*map(str, given)})):
            raise ValueError(
                f"got {', '.join(found)}, which would tell a number of a single site or example: allowed are labels, "
                "targets and features, whose bins tell where the values of all sites together lie"
            )
        return given

    def question(self, seed: int) -> Question:
        """Return the layout for the sites, with the run's seed."""
        targets, features = (
            tuple((name, tuple(map(float, edges))) for name, edges in sorted(each.items()))
            for each in (self.targets, self.features)
        )
        return Question(tuple(self.splits), tuple(sorted(self.labels.items())), targets, features, seed)

    def faults(self) -> Iterator[str]:
        """Yield why sites could not add these statistics."""
        for fault in faults_of(self.question(0)):
            yield f"secure.statistics.{fault}"
        if self.sites and len({*self.sites}) < MEMBERS_MIN:
            yield _fault(
                "secure.statistics.sites",
                ", ".join(self.sites),
                f"a sum has at least {MEMBERS_MIN} members",
                f"{MEMBERS_MIN} different sites or more",
            )


class SecureConfig(BaseModel, **STRICT):
    """Secure sums: the coordinator sees the sum of a session's updates, and no single one."""

    bits: Bits = 32
    """Bits of a word of the sum: 32, with 22 for each client's value, or 64, with 44, which doubles the upload."""

    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Largest norm of an update: each site scales a longer one down to it, over all tensors that travel. The table
    `[secure]` needs it, as there is no default that suits all models."""

    examples_max: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Examples with the full weight 1: an update of n examples counts `min(1, n / examples_max)`, and only the sum of
    these weights becomes known. Needed with `aggregation.weighting` "examples", and refused with "uniform"; absent: all
    updates have weight 1."""

    threshold: Literal["two_thirds"] | Annotated[int, Field(ge=2, le=MEMBERS_MAX)] = "two_thirds"
    """Least number of a session's members that open its sum: "two_thirds" of n, `floor(2 n / 3) + 1`, or a count above
    n / 2. A session that loses more members than that leaves opens nothing."""

    session_max: int = Field(default=MEMBERS_MAX, ge=SESSION_MAX_LEAST, le=MEMBERS_MAX)
    """Most members of a session; a larger cohort is divided into more sessions."""

    sessions: int = Field(default=1, ge=1, le=1_000_000)
    """Least number of sessions into which a round's clients are divided at random. With more than one, a session whose
    sum is longer than its members may make it is dropped alone; but each update hides among fewer."""

    stage_timeout: Seconds = 60.0
    """Seconds for each stage of a session: shares, masked updates with their upload, agreement on the survivors,
    opening, and the keys of a further attempt. The keys of the first attempt come by the round's deadline, and its
    masked updates may take until then, too."""

    attempts: int = Field(default=3, ge=1, le=ATTEMPTS_MAX)
    """Most attempts at the sum of a session whose members drop out before they are told who survived; each has new
    keys, and no client trains again."""

    metrics: dict[str, Annotated[int, Field(ge=1, le=SUMS_MAX)]] = {}
    """Metrics of the training, and of evaluations by clients, that are added, by the task's name for them, each with
    its number of sums: 2 for a plain function, which returns (total, count). The loss always is, with 2. The record of
    a round and an evaluation have no other ones: names and numbers are part of the sum's terms, so they are told before
    any site works."""

    statistics: SecureStatistics | None = None
    """Layout of the statistics of the sites' data before the run; absent: none may be asked for."""

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: dict[str, int]) -> dict[str, int]:
        in_metric_order({**LOSS, **metrics})
        return metrics

    def rules(self) -> SecureRules:
        """Return the rules for the run's machine."""
        return SecureRules(
            clip_norm=self.clip_norm,
            bits=self.bits,
            examples_max=self.examples_max or 0,
            threshold=str(self.threshold),
            session_max=self.session_max,
            sessions=self.sessions,
            stage_timeout=self.stage_timeout,
            attempts=self.attempts,
            metrics=tuple((name, length) for name, length in in_metric_order({**LOSS, **self.metrics})),
        )

    def faults_of_rounds(self, policy: StragglerPolicy) -> Iterator[str]:
        """Yield the settings of a straggler policy that secure sums exclude, and sessions that cannot be."""
        if policy.is_asynchronous:
            yield _fault("round.mode", policy.mode, "the members of a session add their updates together", '"sync"')
            return  # the other fields of its rounds have other meanings
        if policy.late != "discard":
            yield _fault("round.late", policy.late, "an update is masked for the session of its round", '"discard"')
        if policy.partial_work != "accept":
            yield _fault("round.partial_work", policy.partial_work, "the work of one update is not visible", '"accept"')
        if policy.max_share != 1:
            out = "1: secure.examples_max bounds the weight of each update"
            yield _fault("round.max_share", policy.max_share, "the weight of one update is not visible", out)
        for name in ("max_examples", "max_units"):
            if (given := getattr(policy, name)) != (default := StragglerPolicy.model_fields[name].default):
                out = f"{default}, the default: secure.examples_max bounds the weight of each update"
                yield _fault(f"round.{name}", given, "the examples of one update are not visible", out)
        yield from self._faults_of_sizes(policy)

    def _faults_of_sizes(self, policy: StragglerPolicy) -> Iterator[str]:
        """Yield the faults of cohorts that divide into no sessions, or into sessions without a threshold."""
        if (cohort := policy.cohort_size) < MEMBERS_MIN:
            yield _fault(
                "round.cohort_size", cohort, f"a session has at least {MEMBERS_MIN} members", f">= {MEMBERS_MIN}"
            )
            return
        if policy.quorum_count < MEMBERS_MIN:
            what = f"a session has at least {MEMBERS_MIN} members, so no round could end with fewer"
            yield _fault("round.quorum", policy.quorum, what, f"{MEMBERS_MIN} to {cohort}")
        if self.sessions > (most := cohort // MEMBERS_MIN):
            what = f"{count_of(cohort, 'update')} make {count_of(most, 'session')} of {MEMBERS_MIN} members or more"
            out = f"1 to {most}" if most > 1 else "1"
            out += f", or a round.cohort_size of at least {MEMBERS_MIN * self.sessions}"
            yield _fault("secure.sessions", self.sessions, what, out)
            return
        rules, invited = self.rules(), policy.num_invited
        full = self.session_max * max(self.sessions, -(-cohort // self.session_max))  # clients; one more: more sessions
        numbers = {cohort, invited, *(number for number in (full, full + 1) if cohort < number < invited)}
        sizes = {size for number in numbers for size in rules.sizes(number)}
        yield from self._faults_of_threshold(min(sizes), max(sizes))
        from atoll.tensors.secure.vector import fault_of  # it imports numpy

        if fault := fault_of(self.bits, max(sizes)):
            yield f"secure.bits: got {self.bits}, and {fault}: allowed is 64, or a smaller session_max"

    def _faults_of_threshold(self, smallest: int, largest: int) -> Iterator[str]:
        if isinstance(self.threshold, str) or largest < 2 * self.threshold <= 2 * smallest:
            return
        sizes = count_of(smallest, "member") if smallest == largest else f"{smallest} to {largest} members"
        why = (
            f"a session of {sizes} has no such number"
            if self.threshold > smallest
            else f"in a session of {sizes} two groups of that size could open two sums"
        )
        low = largest // 2 + 1
        counts = f"{low} to {smallest}" if low < smallest else f"{low}" if low == smallest else ""
        yield _fault("secure.threshold", self.threshold, why, f'{counts}{counts and ", or "}"{TWO_THIRDS}"')

    def faults_of_aggregation(self, aggregation: AggregationConfig) -> Iterator[str]:
        """Yield the settings of an aggregation that secure sums exclude. Loads no user code."""
        plain = AggregationConfig()
        why = {
            "algorithm": "its correction needs values of single updates, or tensors beside them",
            "mix_neighbours": "the distance of two updates is not visible",
            "partial": "the members of a session add the same tensors",
            "device": "the words of a sum are added by the CPU",
            "codec": "encoded updates do not add up under masks",
        }
        for name, reason in why.items():
            if (given := getattr(aggregation, name)) != (allowed := getattr(plain, name)):
                yield _fault(f"aggregation.{name}", given, reason, shown(allowed))
        yield from self._faults_of_rule(aggregation)
        if aggregation.norm_bound is not None:
            out = "no norm_bound: secure.clip_norm bounds each update at its site"
            yield _fault("aggregation.norm_bound", aggregation.norm_bound, "the norm of one update is not visible", out)
        if aggregation.weighting == "examples" and self.examples_max is None:
            yield (
                'secure.examples_max: missing, and aggregation.weighting is "examples": allowed is the number of '
                'examples with the full weight, at least 1, or aggregation.weighting = "uniform"'
            )
        if aggregation.weighting == "uniform" and self.examples_max is not None:
            out = 'no examples_max, or aggregation.weighting = "examples"'
            yield _fault("secure.examples_max", self.examples_max, 'weighting "uniform" counts all the same', out)

    def _faults_of_rule(self, aggregation: AggregationConfig) -> Iterator[str]:
        rule, allowed = aggregation.rule, f'"mean", and with secure.sessions >= {SESSIONS_OF_A_RULE} '
        allowed += "over the means of sessions " + " and ".join(f'"{name}"' for name in OF_SESSIONS)
        if rule == "mean":
            return
        if rule not in OF_SESSIONS:
            yield _fault("aggregation.rule", rule, "only the sums of sessions are visible", allowed)
        elif self.sessions < SESSIONS_OF_A_RULE:
            what = f"it would have the {count_of(self.sessions, 'mean')} of secure.sessions"
            yield _fault("aggregation.rule", rule, what, allowed)
        elif fault := aggregation.fault_of_count(self.sessions):
            out = "fewer, or more secure.sessions"
            what = f"a round has the means of {self.sessions} sessions, of which {fault.partition(': ')[2]}"
            yield _fault("aggregation.malicious", aggregation.malicious, what, out)

    def faults_of_sampler(self, sampler: str) -> Iterator[str]:
        """Yield the fault of a sampler that needs values of single clients."""
        if why := _SEES_SITES.get(sampler):
            yield _fault("cohort.sampler", sampler, why, '"uniform", "stratified", or a custom one')

    def faults_of_evaluation(
        self, clients_every: int, clients_max: int, keep_sites: int, kept_by_default: int
    ) -> Iterator[str]:
        """Yield the settings of the evaluations by clients that would make no sums, or show single sites."""
        if clients_every and 0 < clients_max < MEMBERS_MIN:
            what = f"the clients' metrics are added in sessions of at least {MEMBERS_MIN}"
            yield _fault("evaluation.clients_max", clients_max, what, f"0, for all clients, or at least {MEMBERS_MIN}")
        if keep_sites not in (0, kept_by_default):
            yield _fault("evaluation.keep_sites", keep_sites, "there are no metrics of single sites", "0")

    def faults_of_watching(self, model: ModelConfig, stop: StopConfig) -> Iterator[str]:
        """Yield the metrics of clients that choose the best version or end the run, and that no sum has."""
        of_stop, added = None if stop.rule is None else stop.rule.metric, {**LOSS, **self.metrics}
        for key, metric in (("model.best", model.metric), ("stop.metric", of_stop)):
            if metric is not None and metric.source == "clients" and metric.name not in added:
                out = f'a metric of secure.metrics ({", ".join(sorted(added))}), or source = "server"'
                yield _fault(key, metric.name, "the clients add only the metrics that the terms name", out)

    def faults_of_program(self, main: str) -> Iterator[str]:
        """Yield the fault of a run of messages, whose replies the program reads one by one."""
        if main:
            out = "a run of rounds, for a Flower app program.native = true: run it natively"
            yield _fault("program.main", main, "the program reads the reply of each site", out)

    def faults_of_local(self, text: str) -> Iterator[str]:
        """Yield the fault of values for the task that are too long for the terms of a sum; `text`: as JSON."""
        if len(text) > TEXT_MAX:
            what = f"the values of [local], [task] and [schedule.local] are {len(text)} characters of JSON"
            yield f"secure: {what}, and the terms of a sum have at most {TEXT_MAX} of them: allowed are shorter values"
            return
        size = len(json.dumps([text, *self.metrics])) + _OF_OTHER_TERMS
        if size > BYTES_MAX:
            what = f"the terms of a sum, with the values of [local] and the names of secure.metrics, have {size} bytes"
            yield f"secure: {what}: allowed are {BYTES_MAX}, by fewer metrics or shorter names and values"

    def notice_of_rounds(self, policy: StragglerPolicy) -> str:
        """Return a notice if a session cannot lose a single member; empty: each can."""
        size = min(self.rules().sizes(policy.cohort_size), default=0)
        needed = self.rules().threshold_of(size)
        if size > needed:
            return ""
        return (
            f"secure.threshold: {needed} of the {size} members of a session open its sum, so one member that drops out "
            "ends its session: a larger round.cohort_size leaves slack"
        )


def faults_of_layout(layout: Layout) -> Iterator[str]:
    """Yield the fault of a model with tensors beside it, which each client would send changed."""
    if beside := [tensor.name for tensor in layout if tensor.name.startswith(BESIDE)]:
        names = ", ".join(beside[:3]) + (", ..." if len(beside) > 3 else "")
        what = f"its algorithm sends {count_of(len(beside), 'tensor')} beside the model ({names})"
        yield f"task: {what}, and with [secure] only the model's add up: allowed is an algorithm without shared tensors"
