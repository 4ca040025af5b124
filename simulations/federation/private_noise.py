"""The noise of simulated private sums: its key and its cohort.

A sum of n clients, divided by n, has the noise of a cohort of N clients if its noise is n / N times as long:

    z C n / N / n = z C / N

So a cohort that this machine cannot train is tried with fewer clients. Such a sum protects nothing, as its noise is
too short for its clients; nor does any other simulated one, as its noise follows from the seed.
"""

from collections.abc import Iterator
from dataclasses import replace

from atoll.aggregation.noise.private_sum import fault_of_sum
from atoll.ground.noise.key import BYTES, key_of
from atoll.server.config.exclusion import excluded
from atoll.server.config.run import RunConfig
from atoll.server.folding.plan import Private
from atoll.server.folding.reducer import private_of
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.simulations.federation.report import NOISE_COHORT


def private_of_simulation(config: RunConfig, noise_cohort: int | None) -> Private | None:
    """Return what the plan of a simulated private sum needs; None: the run has no guarantee for clients.

    Args:
        config: of the run.
        noise_cohort: clients of the cohort whose noise a sum has; None: of the run's.
    """
    private = private_of(config, key_of(bytes(BYTES), "simulation", config.seed, config.name))
    if private is None or noise_cohort is None:
        return private
    assert config.privacy is not None
    rules = config.privacy.rules(config.rounds, noise_cohort)
    return replace(private, rules=_shortened(rules, private.cohort_size, noise_cohort))


def _shortened(rules: PrivacyRules, cohort: int, noise_cohort: int) -> PrivacyRules:
    """Return the rules with noise for fewer clients, of the sum and of an adaptive count; they account for nothing."""
    share, adaptive = cohort / noise_cohort, rules.adaptive
    if adaptive is not None:
        adaptive = replace(adaptive, sigma=adaptive.sigma * share, clients=cohort)
    return replace(rules, noise_multiplier=rules.noise_multiplier * share, adaptive=adaptive)


def faults_of_noise_cohort(config: RunConfig, noise_cohort: int | None) -> Iterator[str]:
    """Yield why the sums of a simulation cannot have the noise of another cohort."""
    if noise_cohort is None:
        return
    privacy, cohort = config.privacy, config.round.cohort_size
    if privacy is None:
        yield f"{NOISE_COHORT}: got {noise_cohort}, and the run has no noise: allowed with a table [privacy]"
        return
    if privacy.noise_by != "coordinator":
        why = "each site's noise is as long as in any other cohort"
        if privacy.noise_by == "clients":
            why = "the clients add the noise, for which the size of their sessions decides"
        yield f"{NOISE_COHORT}: got {noise_cohort}, and {why}: allowed with noise by the coordinator"
        return
    if noise_cohort < cohort:
        what = f"which is less than round.cohort_size ({cohort})"
        yield f"{NOISE_COHORT}: got {noise_cohort}, {what}: allowed is that number or more"
        return
    yield from privacy.faults_of_delta(noise_cohort)
    z = privacy.rules(config.rounds, noise_cohort).noise_multiplier
    if fault := fault_of_sum(noise_cohort, z):
        yield excluded("privacy", NOISE_COHORT, noise_cohort, fault, "a smaller one")
