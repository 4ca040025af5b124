"""The settings of differential privacy, and what does not go with it: with the reason and the way out."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from atoll.ground.printable import count_of
from atoll.protocol.privacy.adaptive_clip import AdaptiveClip
from atoll.protocol.privacy.correlated import BANDS, ROUNDS_MAX, best_bands
from atoll.protocol.privacy.gaussian import mu_within, noise_multiplier_of
from atoll.protocol.secure.session_size import MEMBERS_MAX
from atoll.protocol.settings import STRICT
from atoll.server.config.aggregation import AggregationConfig
from atoll.server.config.example_privacy import OF_EXAMPLES, ExampleTerms, bound_of_noise, noise_of, steps_of
from atoll.server.config.exclusion import excluded, shown
from atoll.server.config.model import ModelConfig, StopConfig
from atoll.server.config.secure import SecureConfig
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.privacy_rules import CorrelatedRules, PrivacyRules, SharedRules
from atoll.server.rounds.secure_rules import SecureRules
from atoll.tensors.layout import BESIDE, FLOATS, Layout

_Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]

_SEES_SITES = {
    "weighted": "cohorts would depend on the size of each client's data",
    "power_of_choice": "cohorts would depend on the loss of each client",
    "oort": "cohorts would depend on the loss of each client",
}
"""Samplers by values of single clients, which their cohorts would release."""

_fault = partial(excluded, "privacy")
_best_bands = lru_cache(maxsize=64)(best_bands)


class PrivacyConfig(BaseModel, **STRICT):
    """Differential privacy: a guarantee for clients or examples, with a budget that no restart refunds."""

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

    clip: Literal["fixed", "adaptive"] = "fixed"
    """Clip norm: "fixed", or "adaptive": it begins at `clip_norm` and follows a quantile of the lengths of updates,
    which each round counts with noise. Both parts of a round cost what one costs with a fixed norm."""

    clip_quantile: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Share of updates that "adaptive" leaves unclipped; absent: 0.5."""

    clip_learning_rate: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """Step of "adaptive" in the logarithm of the clip norm; absent: 0.2."""

    clip_sigma: _Positive | None = None
    """Standard deviation of the noise of the count for "adaptive", in clients: above half of `noise_multiplier`;
    absent: a twentieth of `round.cohort_size`, and at least five times `noise_multiplier`."""

    mechanism: Literal["gaussian", "correlated"] = "gaussian"
    """Noise of a round, or of a step: "gaussian", independent of others; or "correlated", of which later rounds take
    off a part again, so that the model has less of it in the end. All rounds together are then one use, and a client
    waits `separation_min` versions from one use to the next."""

    separation_min: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of correlated noise: the least distance of two versions with a client's update; a client is no candidate before.
    More clients allow more: about their number over `round.cohort_size`; absent: refused with correlated noise, and the
    only way without."""

    bands: Annotated[int, Field(ge=1, le=BANDS[-1])] | None = None
    """Of correlated noise: rounds whose noise is in the noise of a round; absent: the number with the least error over
    all rounds."""

    participations_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most rounds in whose sum one client's updates are; a client that has been in as many is no candidate any more;
    absent: `rounds`, with correlated noise as many as `separation_min` allows."""

    noise_by: Literal["coordinator", "clients", "site"] = "coordinator"
    """The party that adds the noise: "coordinator", which is trusted to; or "clients", each a share inside its secure
    sum (`[secure]`), so that the guarantee holds against the coordinator, too; for examples "site", each for its
    own steps, or "clients", who make one step a round and share its noise."""

    batch: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Of examples with noise by the clients: the number by which each site divides the sum of its step, the same at all
    sites, such as `sample_rate` times the examples of the largest; absent: refused there."""

    honest_min: Annotated[int, Field(ge=1, le=MEMBERS_MAX)] | None = None
    """Of noise by the clients: the fewest honest members of a sum. Each member adds 1 / `honest_min` of the variance,
    and none takes part in a sum of fewer than `honest_min` + `colluders`; absent: the threshold of the smallest session
    of a whole cohort, less `colluders`."""

    colluders: Annotated[int, Field(ge=0, le=MEMBERS_MAX)] | None = None
    """Of noise by the clients: members of a sum that may work together with the coordinator and tell it their shares of
    the noise; absent: 1. A site refuses fewer than its policy's `colluders_max`."""

    @property
    def is_shared(self) -> bool:
        """Whether the clients add the noise."""
        return self.noise_by == "clients"

    @property
    def colluders_assumed(self) -> int:
        """Number of colluders against which the noise suffices."""
        return 1 if self.colluders is None else self.colluders

    def honest_of(self, secure: SecureRules, cohort: int) -> int:
        """Return h, the fewest honest members of a sum; below 1: no session has any.

        Args:
            secure: of the secure sums.
            cohort: clients of a round.
        """
        if self.honest_min is not None:
            return self.honest_min
        smallest = min(secure.sizes(cohort), default=0)
        return secure.threshold_of(smallest) - self.colluders_assumed

    def of_sums(self, secure: SecureRules, rounds: int, cohort: int) -> SecureRules:
        """Return the rules of secure sums with those of their privacy.

        Args:
            secure: of the sums.
            rounds: of the run.
            cohort: clients of a round.
        """
        from atoll.tensors.secure.vector import share_of_noise  # it imports numpy

        if not self.is_shared:
            return replace(secure, is_private=True, metrics=())
        honest = max(1, self.honest_of(secure, cohort))
        share = share_of_noise(secure.bits, self.multiplier_of_sum(rounds, cohort), honest)
        return replace(secure, is_private=True, metrics=(), share=share, sum_min=honest + self.colluders_assumed)

    def multiplier_of_sum(self, rounds: int, cohort: int, noise: Callable[[ExampleTerms], float] = noise_of) -> float:
        """Return the standard deviation of the noise of a secure sum, in its clip norm: of examples z / `batch`.

        Args:
            rounds: of the run.
            cohort: clients of a round.
            noise: returns z of examples.
        """
        terms = self._shared_examples(rounds)
        if terms is None:
            return self.rules(rounds, cohort).noise_multiplier
        assert self.batch is not None
        return noise(terms) / self.batch

    def _shared_examples(self, rounds: int) -> ExampleTerms | None:
        """Return the terms of steps to whose sum the clients add the noise; None: there are none."""
        is_shared = self.unit == "example" and self.is_shared and self.batch is not None
        return self.of_examples({"max_steps": 1}, rounds) if is_shared else None

    @model_validator(mode="before")
    @classmethod
    def _noise_of_unit(cls, given: Any) -> Any:
        """Complete the table: examples have noise by their site."""
        if isinstance(given, Mapping) and given.get("unit") == "example":
            return {"noise_by": "site", **given}
        return given

    def faults_of_unit(self) -> Iterator[str]:
        """Yield what the unit lacks, or is of the other one; the same sentences as of a centralized training."""
        is_of_examples = self.noise_by == "site" or (self.unit == "example" and self.is_shared)
        if (self.unit == "example") != is_of_examples:
            out = '"site", "clients"' if self.unit == "example" else '"coordinator", "clients"'
            why = f'privacy.noise_by: got "{self.noise_by}", and with privacy.unit = "{self.unit}"'
            yield f"{why} others add the noise: allowed is {out}"
        if self.unit == "example" and self.is_shared and self.batch is None:
            yield f'privacy.batch: missing: {OF_EXAMPLES} with noise_by = "clients" needs it'
        if self.batch is not None and not (self.unit == "example" and self.is_shared):
            without = f'without {OF_EXAMPLES} and noise_by = "clients" it has no effect: set these, or leave this out'
            yield f"privacy.batch: got {self.batch:g}: {without}"
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
            batch=(self.batch or 0.0) if self.is_shared else 0.0,
        )

    def told(self, rounds: int) -> dict[str, Any]:
        """Return what a site must know and approve of a guarantee for clients, by the names of the settings."""
        if self.unit != "client":
            return {}
        uses = self._uses_of(rounds)
        return {
            "unit": "client",
            "noise_by": self.noise_by,
            "clip_norm": self.clip_norm,
            "noise_multiplier": self._multiplier_of(rounds),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "participations_max": uses,
            **({"mechanism": self.mechanism, "separation_min": self._apart} if self.is_correlated else {}),
            **({"clip": self.clip, "clip_quantile": self.clip_quantile or 0.5} if self.clip == "adaptive" else {}),
        }

    @property
    def is_correlated(self) -> bool:
        """Whether the noise of a round depends on the noise of others."""
        return self.mechanism == "correlated"

    @property
    def _apart(self) -> int:
        return self.separation_min or 1

    def _uses_of(self, rounds: int) -> int:
        """Return the most sums that one client's updates are in."""
        if not self.is_correlated:
            return self.participations_max or rounds
        most = -(-rounds // self._apart)
        return min(self.participations_max or most, most)

    def _multiplier_of(self, rounds: int) -> float:
        """Return z; of correlated noise, of all rounds together."""
        uses = 1 if self.is_correlated else self._uses_of(rounds)
        return self.noise_multiplier or noise_multiplier_of(self.epsilon, self.delta, uses)

    def bands_of(self, rounds: int) -> int | None:
        """Return the rounds whose noise is in the noise of a round; None: noise is independent."""
        if not self.is_correlated:
            return None
        if rounds > ROUNDS_MAX:
            return 1  # a fault
        return self.bands or _best_bands(rounds, self._apart, self._uses_of(rounds))

    def rules(self, rounds: int, cohort_size: int, honest_min: int = 0) -> PrivacyRules:
        """Return the rules of a guarantee for clients, for the run's machine.

        Args:
            rounds: of the run.
            cohort_size: fixed number of clients of a round.
            honest_min: of noise by the clients, the fewest honest members of a sum.
        """
        uses, z = self._uses_of(rounds), self._multiplier_of(rounds)
        values: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": z,
            "clip_norm": self.clip_norm,
            "participations_max": uses,
            "spent_max": mu_within(self.epsilon, self.delta) ** 2,
        }
        if (bands := self.bands_of(rounds)) is not None:
            rounds = min(rounds, ROUNDS_MAX)  # more are a fault
            values["participations_max"] = self._uses_of(rounds)
            return CorrelatedRules(**values, rounds=rounds, apart=self._apart, bands=bands)
        if not self.is_shared:
            return PrivacyRules(**values, adaptive=self._adaptive(z, cohort_size))
        return SharedRules(**values, honest_min=honest_min, colluders=self.colluders_assumed)

    def _adaptive(self, z: float, cohort_size: int) -> AdaptiveClip | None:
        if self.clip == "fixed":
            return None
        sigma = self.clip_sigma or max(cohort_size / 20.0, 5.0 * z)
        return AdaptiveClip(self.clip_quantile or 0.5, self.clip_learning_rate or 0.2, sigma, cohort_size)

    def faults_of_mechanism(self, rounds: int, *, is_secure: bool) -> Iterator[str]:
        """Yield what correlated noise lacks or excludes, and its settings that have no effect without it."""
        if not self.is_correlated:
            for name in ("separation_min", "bands"):
                if (given := getattr(self, name)) is not None:
                    what = f"privacy.{name}: got {given}, and the noises of rounds are independent"
                    yield f'{what}: allowed with privacy.mechanism = "correlated"'
            return
        for why in self._why_not_correlated(is_secure=is_secure):
            yield _fault("privacy.mechanism", self.mechanism, why, '"gaussian"')
        of_run = f"and the run has {count_of(rounds, 'round')}"
        if self.separation_min is None:
            needs = 'privacy.mechanism = "correlated" needs it: the number of clients over round.cohort_size, or less'
            yield f"privacy.separation_min: missing: {needs}"
        for name, given in (("separation_min", self.separation_min), ("bands", self.bands)):
            if given is not None and given > rounds:
                yield f"privacy.{name}: got {given}, {of_run}: allowed is 1 to {rounds}"
        if rounds > ROUNDS_MAX:
            out = f'at most {ROUNDS_MAX}, or privacy.mechanism = "gaussian"'
            yield f"rounds: got {rounds}, over which correlated noise is not computed: allowed is {out}"

    def _why_not_correlated(self, *, is_secure: bool) -> Iterator[str]:
        """Yield the reasons that noise cannot be correlated."""
        if self.unit == "example":
            yield "each site adds the noise of its own steps, which no round of others takes off"
        elif self.noise_by == "clients":
            yield "shares of clients that are gone could not be taken off again"
        if self.clip == "adaptive":
            yield "its noise is computed for one clip norm over all rounds"
        if is_secure:
            yield "the noise of earlier rounds is not on the grid of secure sums"

    def faults_of_separation(self, num_clients: int, cohort_size: int) -> Iterator[str]:
        """Yield the fault of a separation that leaves too few of a fixed number of clients for a round."""
        if self.is_correlated and self._apart * cohort_size > num_clients:
            most = num_clients // cohort_size
            why = f"{count_of(num_clients, 'client')} in cohorts of {cohort_size} are used again after {most}"
            out = f"1 to {most}" if most else "a smaller round.cohort_size"
            yield f"privacy.separation_min: got {self._apart}, and {why}: allowed is {out}"

    def faults_of_clip(self, rounds: int, cohort_size: int, *, is_secure: bool) -> Iterator[str]:
        """Yield the settings of an adaptive clip norm that have no effect, or whose count costs more than the round."""
        given = {name: getattr(self, name) for name in ("clip_quantile", "clip_learning_rate", "clip_sigma")}
        if self.clip == "fixed":
            for name, value in given.items():
                if value is not None:
                    what = f"privacy.{name}: got {value:g}, and the clip norm is fixed"
                    yield f'{what}: allowed with privacy.clip = "adaptive"'
            return
        if self.is_correlated:
            return  # a fault of the mechanism
        if self.noise_by != "coordinator":
            why = f'privacy.noise_by is "{self.noise_by}", and only the coordinator counts the updates within the norm'
            yield _fault("privacy.clip", self.clip, why, '"fixed"')
            return
        if is_secure:
            yield _fault("privacy.clip", self.clip, "masked updates have [secure], and no length to count", '"fixed"')
            return
        rules = self.rules(rounds, cohort_size)
        assert rules.adaptive is not None
        if (z := rules.noise_multiplier) >= 2.0 * rules.adaptive.sigma:
            why = f"the count alone would cost more than a round with noise multiplier {z:.6g}"
            out = f"more than {z / 2.0:.6g}, such as {5.0 * z:.6g}, or none"
            yield _fault("privacy.clip_sigma", rules.adaptive.sigma, why, out)

    def faults_of_budget(self, rounds: int, cohort_size: int) -> Iterator[str]:
        """Yield the fault of a budget that does not allow a single round."""
        rules = self.rules(rounds, cohort_size)
        if not rules.allows(0.0, 0):
            one = rules.epsilon_of(rules.cost)
            out = f"at least {noise_multiplier_of(self.epsilon, self.delta):.6g}, or a larger epsilon"
            what = "all rounds together cost" if self.is_correlated else "one round costs"
            yield _fault("privacy.noise_multiplier", self.noise_multiplier, f"{what} epsilon {one:.6g}", out)

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
        if self.is_shared:
            return  # its sums are in words, whose room `faults_of_secure` checks
        from atoll.aggregation.noise.private_sum import fault_of_sum  # it imports numpy

        z = self.rules(rounds, policy.cohort_size).noise_multiplier
        if fault := fault_of_sum(policy.cohort_size, z):
            yield f"privacy.noise_multiplier: {fault}: allowed is more noise, or a smaller round.cohort_size"

    def faults_of_delta(self, num_clients: int) -> Iterator[str]:
        """Yield the fault of a delta that allows to publish one client, where this is the least number of clients."""
        if self.unit == "client" and self.delta >= 1.0 / num_clients:
            why = f"1 / {num_clients} or more allows to publish one of {count_of(num_clients, 'client')} unprotected"
            safe = 10.0 ** -math.ceil(math.log10(num_clients) + 1.0)
            yield _fault("privacy.delta", self.delta, why, f"less than 1 / {num_clients}, such as {safe:g}")

    def faults_of_aggregation(self, aggregation: AggregationConfig) -> Iterator[str]:
        """Yield the settings of an aggregation that a guarantee for clients excludes. Loads no user code."""
        plain = AggregationConfig()
        if aggregation.weighting != "uniform":
            what = "with other weights one client could have most of the sum"
            if self.unit == "example":
                what = "each site divides its sum by privacy.batch, so that all examples have the same weight"
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

    def faults_of_own_noise(self) -> Iterator[str]:
        """Yield the settings of noise by the clients, where each site adds the noise of its steps."""
        for name in ("honest_min", "colluders"):
            if (given := getattr(self, name)) is not None:
                out = f'no {name}, or noise_by = "clients"'
                yield _fault(f"privacy.{name}", given, "each site adds the noise of its steps", out)

    def faults_of_secure(self, secure: SecureConfig | None, policy: StragglerPolicy, rounds: int) -> Iterator[str]:
        """Yield the faults of the parties that add the noise, and of secure sums that cannot hold it."""
        if not self.is_shared:
            for name in ("honest_min", "colluders"):
                if (given := getattr(self, name)) is not None:
                    out = f'no {name}, or noise_by = "clients"'
                    yield _fault(f"privacy.{name}", given, "the coordinator adds the noise", out)
        if secure is None:
            if self.is_shared:
                what = "the clients add their shares of the noise inside secure sums, and the run has no [secure]"
                other = "coordinator" if self.unit == "client" else "site"
                yield _fault("privacy.noise_by", self.noise_by, what, f'"{other}", or a table [secure]')
            return
        if secure.clip_norm != self.clip_norm:
            what = f"each site clips its update once, and privacy.clip_norm is {self.clip_norm:g}"
            yield _fault("secure.clip_norm", secure.clip_norm, what, f"{self.clip_norm:g}")
        if secure.metrics:
            what = "their sums would be released without noise"
            yield _fault("secure.metrics", sorted(secure.metrics), what, "no metrics")
        yield from self._faults_of_sums(secure.rules(), policy, rounds)

    def _faults_of_sums(self, secure: SecureRules, policy: StragglerPolicy, rounds: int) -> Iterator[str]:
        """Yield the faults of the sizes of sessions, and of words without room for the noise."""
        from atoll.tensors.secure.vector import fault_of_noise, share_of_noise  # it imports numpy

        sizes = secure.sizes(policy.cohort_size)
        if policy.is_asynchronous or not sizes:
            return  # the faults of secure sums
        z = self.multiplier_of_sum(rounds, policy.cohort_size, bound_of_noise)
        out = "secure.bits = 64, or another noise_multiplier"
        if not self.is_shared:
            if fault := fault_of_noise(secure.bits, 1, share_of_noise(secure.bits, z, 1)):
                yield f"privacy.noise_multiplier: {fault}: allowed is {out}"
            return
        honest, colluders = self.honest_of(secure, policy.cohort_size), self.colluders_assumed
        smallest, number = min(sizes), honest + colluders
        threshold = secure.threshold_of(smallest)
        if honest < 1 or 2 * threshold <= smallest + colluders:
            most = min(threshold - 1, 2 * threshold - smallest - 1)
            what = f"{threshold} of the {smallest} members of a session open its sum"
            yield _fault("privacy.colluders", colluders, what, f"0 to {most}, or a larger round.cohort_size")
            return
        if number > smallest:
            what = f"with {count_of(colluders, 'colluder')} a sum would have {number} of the {smallest} in a session"
            yield _fault("privacy.honest_min", honest, what, f"1 to {smallest - colluders}")
            return
        if policy.quorum_count < number:
            what = f"a sum has at least {number} members, {honest} honest ones and {colluders}"
            allowed = f"{number} to {policy.cohort_size}, or a smaller privacy.honest_min, which adds more noise"
            yield _fault("round.quorum", policy.quorum, what, allowed)
        largest = max(size for clients in {policy.cohort_size, policy.num_invited} for size in secure.sizes(clients))
        if fault := fault_of_noise(secure.bits, largest, share_of_noise(secure.bits, z, honest)):
            yield f"privacy.noise_multiplier: {fault}: allowed is {out}"

    def notices(self, rounds: int, secure: SecureConfig | None) -> Iterator[str]:
        """Yield what is allowed and probably not meant."""
        if self.is_shared and secure is not None and secure.sessions > 1:
            yield (
                f"secure.sessions: got {secure.sessions}, and each sum has its noise, which together is that of one, "
                f'multiplied by {math.sqrt(secure.sessions):.3g}: privacy.noise_by = "clients" needs no more than 1'
            )
        if self.is_correlated and self._apart > 1:
            what = f"rounds wait unless round.cohort_size times {self._apart} clients or more take part"
            yield f"privacy.separation_min: {what}"
        if self.bands_of(rounds) == 1:
            yield 'privacy.mechanism: with one band, the best at a small separation, the noise is that of "gaussian"'
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


def faults_of_layout(
    layout: Layout, buffers: frozenset[str], rules: PrivacyRules, secure: SecureRules | None = None
) -> Iterator[str]:
    """Yield the tensors of a model that a guarantee for clients cannot cover.

    Args:
        layout: of the tensors that travel.
        buffers: the float tensors that no optimizer trains.
        rules: of the privacy.
        secure: of secure sums; None: updates are plain.
    """
    from atoll.aggregation.noise.private_sum import clip_to, deviation_of, exponent_of
    from atoll.tensors.secure.plan import Encoding

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
        if secure is not None:
            exponents = (0,) * sum(tensor.dtype in FLOATS for tensor in layout)
            encoding = Encoding(bits=secure.bits, clip_norm=secure.clip_norm, exponents=exponents, is_private=True)
            encoding.factor(1, 0.0, values)
        else:
            deviation = rules.sum_multiplier * rules.clip_norm
            deviation = deviation_of(deviation, rules.noise_multiplier, values, rules.rounding)
            clip_to(rules.clip_norm, exponent_of(deviation), values)
    except ValueError as fault:
        yield f"privacy.noise_multiplier: {fault}"
