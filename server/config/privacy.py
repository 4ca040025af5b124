"""The settings of differential privacy, and what does not go with it: with the reason and the way out."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from atoll.ground.printable import count_of
from atoll.protocol.privacy.gaussian import mu_within, noise_multiplier_of
from atoll.protocol.settings import STRICT
from atoll.server.config.aggregation import AggregationConfig
from atoll.server.config.example_privacy import OF_EXAMPLES, ExampleTerms, steps_of
from atoll.server.config.exclusion import excluded, shown
from atoll.server.config.model import ModelConfig, StopConfig
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.tensors.layout import BESIDE, FLOATS, Layout

_Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]

_SEES_SITES = {
    "weighted": "cohorts would depend on the size of each client's data",
    "power_of_choice": "cohorts would depend on the loss of each client",
    "oort": "cohorts would depend on the loss of each client",
}
"""Samplers by values of single clients, which their cohorts would release."""


_fault = partial(excluded, "privacy")


class PrivacyConfig(BaseModel):
    """Differential privacy: a guarantee for clients or examples, with a budget that no restart refunds."""

    model_config = STRICT

    unit: Literal["client", "example"] = "client"
    """What is protected: "client", all that one client contributes to the run; "example", one row of the training data
    of one client."""

    epsilon: _Positive
    """Budget of each client: the run ends before the round that would exceed it."""

    delta: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
    """Probability with which epsilon may fail: below 1 / `round.cohort_size`, better far below 1 / all clients; for
    examples below 1 / the number of examples of each site, which refuses others."""

    noise_multiplier: _Positive | None = None
    """Standard deviation of the noise of a round's sum, for examples of a step's sum, in clip norms; absent: the least
    one with which a client may take part `participations_max` times."""

    clip_norm: _Positive
    """Largest norm of an update, over all float tensors together; the coordinator scales a longer one down to it. For
    examples: largest norm of one example's gradient."""

    sample_rate: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """Probability with which each example of a site takes part in a step, independently of all others, the same at all
    sites; absent: refused for examples, and the only way for clients."""

    mechanism: Literal["gaussian"] = "gaussian"
    """Noise of a round, or of a step: "gaussian", independent of others."""

    participations_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most rounds in whose sum one client's updates are; a client that has been in as many is no candidate any more;
    absent: `rounds`."""

    noise_by: Literal["coordinator", "site"] = "coordinator"
    """The party that adds the noise, and is trusted to: "coordinator"; for examples "site", each for its own."""

    @model_validator(mode="before")
    @classmethod
    def _noise_of_unit(cls, given: Any) -> Any:
        """Complete the table: examples have noise by their site."""
        if isinstance(given, Mapping) and given.get("unit") == "example":
            return {"noise_by": "site", **given}
        return given

    def faults_of_unit(self) -> Iterator[str]:
        """Yield what the unit lacks, or is of the other one; the same sentences as of a centralized training."""
        if (self.unit == "example") != (self.noise_by == "site"):
            out = '"site"' if self.unit == "example" else '"coordinator"'
            why = f'privacy.noise_by: got "{self.noise_by}", and with privacy.unit = "{self.unit}"'
            yield f"{why} others add the noise: allowed is {out}"
        if self.unit == "example" and self.sample_rate is None:
            yield f"privacy.sample_rate: missing: {OF_EXAMPLES} needs it"
        if self.unit == "client" and self.sample_rate is not None:
            without = f"without {OF_EXAMPLES} it has no effect: set that, or leave this out"
            yield f"privacy.sample_rate: got {self.sample_rate!r}: {without}"

    def of_examples(self, local: Mapping[str, Any], rounds: int) -> ExampleTerms | None:
        """Return the terms of a guarantee for examples; None: the guarantee is for clients, or steps are unknown.

        Args:
            local: values of the run for the task's `Local` (`steps_of`).
            rounds: of the run.
        """
        if self.unit != "example" or self.sample_rate is None:
            return None
        steps = steps_of(local, self.sample_rate, rounds)
        if steps is None:
            return None
        return ExampleTerms(
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            sample_rate=self.sample_rate,
            uses=self.participations_max or rounds,
            steps=steps,
        )

    def told(self, rounds: int) -> dict[str, Any]:
        """Return what a site must know and approve of a guarantee for clients, by the names of the settings."""
        if self.unit != "client":
            return {}
        uses = self.participations_max or rounds
        return {
            "unit": "client",
            "noise_by": self.noise_by,
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.noise_multiplier or noise_multiplier_of(self.epsilon, self.delta, uses),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "participations_max": uses,
        }

    def rules(self, rounds: int) -> PrivacyRules:
        """Return the rules of a guarantee for clients, for the run's machine."""
        uses = self.participations_max or rounds
        return PrivacyRules(
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=self.noise_multiplier or noise_multiplier_of(self.epsilon, self.delta, uses),
            clip_norm=self.clip_norm,
            participations_max=uses,
            spent_max=mu_within(self.epsilon, self.delta) ** 2,
        )

    def faults_of_budget(self, rounds: int) -> Iterator[str]:
        """Yield the fault of a budget that does not allow a single round."""
        rules = self.rules(rounds)
        if not rules.allows(0.0, 0):
            one = rules.epsilon_of(rules.cost)
            out = f"at least {noise_multiplier_of(self.epsilon, self.delta):.6g}, or a larger epsilon"
            yield _fault("privacy.noise_multiplier", self.noise_multiplier, f"one round costs epsilon {one:.6g}", out)

    def faults_of_rounds(self, policy: StragglerPolicy, rounds: int) -> Iterator[str]:
        """Yield the settings of a straggler policy that a guarantee for clients excludes."""
        if policy.is_asynchronous:
            what = "an update would count when it comes, and its time depends on one client's data"
            yield _fault("round.mode", policy.mode, what, '"sync"')
            return  # the other fields of its rounds have other meanings
        if policy.late != "discard":
            yield _fault("round.late", policy.late, "an update counts in the round that is charged for it", '"discard"')
        if policy.partial_work == "scaled":
            yield _fault("round.partial_work", policy.partial_work, "all weights are equal", '"accept", "refuse"')
        yield from self.faults_of_delta(max(policy.cohort_size, policy.min_available))
        from atoll.aggregation.noise.private_sum import fault_of_sum  # it imports numpy

        z = self.rules(rounds).noise_multiplier
        if fault := fault_of_sum(policy.cohort_size, z):
            yield f"privacy.noise_multiplier: {fault}: allowed is more noise, or a smaller round.cohort_size"

    def faults_of_delta(self, num_clients: int) -> Iterator[str]:
        """Yield the fault of a delta that allows to publish one client, where this is the least number of clients."""
        if self.delta >= 1.0 / num_clients:
            why = f"1 / {num_clients} or more allows to publish one of {count_of(num_clients, 'client')} unprotected"
            safe = 10.0 ** -math.ceil(math.log10(num_clients) + 1.0)
            yield _fault("privacy.delta", self.delta, why, f"less than 1 / {num_clients}, such as {safe:g}")

    def faults_of_aggregation(self, aggregation: AggregationConfig) -> Iterator[str]:
        """Yield the settings of an aggregation that a guarantee for clients excludes. Loads no user code."""
        plain = AggregationConfig()
        if aggregation.weighting != "uniform":
            what = "with other weights one client could have most of the sum"
            yield _fault("aggregation.weighting", aggregation.weighting, what, '"uniform"')
        if aggregation.algorithm != "fedavg":
            what = "its corrections are values of single clients without noise"
            yield _fault("aggregation.algorithm", aggregation.algorithm, what, '"fedavg"')
        if aggregation.rule != "mean":
            what = "the noise is for a sum of clipped updates"
            yield _fault("aggregation.rule", aggregation.rule, what, '"mean"')
        why = {
            "mix_neighbours": "the distance of two updates would be released",
            "partial": "what an update leaves out would be released",
            "device": "private sums are added by the CPU",
        }
        for name, reason in why.items():
            if (given := getattr(aggregation, name)) != (allowed := getattr(plain, name)):
                yield _fault(f"aggregation.{name}", given, reason, shown(allowed))
        if aggregation.norm_bound is not None:
            out = "no norm_bound"
            yield _fault("aggregation.norm_bound", aggregation.norm_bound, "privacy.clip_norm bounds each update", out)

    def faults_of_sampler(self, sampler: str) -> Iterator[str]:
        """Yield the fault of a sampler that depends on values of single clients."""
        if why := _SEES_SITES.get(sampler):
            yield _fault("cohort.sampler", sampler, why, '"uniform", "stratified", or a custom one')

    def faults_of_evaluation(self, clients_every: int, keep_sites: int, kept_by_default: int) -> Iterator[str]:
        """Yield the faults of evaluations by clients, and of a number of sites whose metrics are kept."""
        if clients_every:
            out = "0, with evaluation.server_every on the server's test data"
            yield _fault("evaluation.clients_every", clients_every, "it would release metrics without noise", out)
        if keep_sites not in (0, kept_by_default):
            yield _fault("evaluation.keep_sites", keep_sites, "no metrics of single sites may be kept", "0")

    def faults_of_watching(self, model: ModelConfig, stop: StopConfig) -> Iterator[str]:
        """Yield the metrics of clients that would choose the best version or end the run."""
        of_stop = None if stop.rule is None else stop.rule.metric
        for key, metric in (("model.source", model.metric), ("stop.source", of_stop)):
            if metric is not None and metric.source == "clients":
                yield _fault(key, metric.source, f"{metric.name} would be released without noise", '"server"')

    def faults_of_program(self, main: str) -> Iterator[str]:
        """Yield the fault of a run of messages, whose program makes of replies what it wants."""
        if main:
            out = "a run of rounds, for a Flower app program.native = true: run it natively"
            yield _fault("program.main", main, "the program releases what it makes of single replies", out)

    def faults_of_secure(self, is_secure: bool) -> Iterator[str]:
        """Yield the fault of secure sums beside noise of the coordinator."""
        if is_secure:
            why = "the run has [secure], too, and a masked update cannot be clipped here"
            yield f"privacy: {why}: allowed is one of the two tables, as noise inside secure sums is not built yet"

    def notices(self, rounds: int) -> Iterator[str]:
        """Yield what is allowed and probably not meant."""
        if self.epsilon > 10:
            yield f"privacy.epsilon: {self.epsilon:g} promises little: docs/privacy.md says what epsilon means"
        if self.unit == "example":
            yield (
                "privacy: the account counts the updates in the sums: a site's own budget counts each training, also "
                "one whose update comes late"
            )
        if (uses := self.participations_max) is not None and uses > rounds:
            yield f"privacy.participations_max: {uses} is more than the {count_of(rounds, 'round')} of the run"


def without_statistics(task: str, run_id: str | None) -> str:
    """Return why there are no statistics of the sites' data of a task, whose private run is `run_id`, if it exists."""
    why = "the run would have [privacy]" if run_id is None else f"run {run_id} of {task!r} is private"
    return (
        f"privacy: {why}, and statistics of the sites' data have no noise: no budget would count them; allowed is a "
        "task for data on which no private run trains"
    )


def faults_of_layout(layout: Layout, buffers: frozenset[str], rules: PrivacyRules) -> Iterator[str]:
    """Yield the tensors of a model that a guarantee for clients cannot cover."""
    from atoll.aggregation.noise.private_sum import clip_to, exponent_of

    for what, names in (
        ("whole numbers, to which no noise is added", [t.name for t in layout if t.dtype not in FLOATS]),
        ("tensors beside the model", [t.name for t in layout if t.name.startswith(BESIDE)]),
        ("buffers, such as the statistics of BatchNorm", sorted(buffers)),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            out = "a model without them (GroupNorm or LayerNorm in place of BatchNorm), or `keep` for them in the task"
            yield f"privacy: updates of this model have {what}: {shown}: allowed is {out}"
    values = sum(tensor.num_elements for tensor in layout if tensor.dtype in FLOATS)
    try:
        clip_to(rules.clip_norm, exponent_of(rules.noise_multiplier * rules.clip_norm), values)
    except ValueError as fault:
        yield f"privacy.noise_multiplier: {fault}"
