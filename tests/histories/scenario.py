"""The scenario of a simulated world: the rules of its run, its clients, and its faults."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

from atoll.protocol.privacy.gaussian import epsilon_of, mu_within
from atoll.protocol.vocabulary import Version
from atoll.server.config.run import CohortConfig
from atoll.server.rounds.events import Sums
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.privacy_rules import (
    CorrelatedRules,
    ExampleRules,
    PrivacyRules,
    SharedExampleRules,
    SharedRules,
)
from atoll.server.rounds.run_rules import EarlyStop, RunRules, Source, WaitRules, WatchedMetric
from atoll.server.rounds.secure_rules import SecureRules
from tests.histories.faults import Faults, Seconds, random_faults

TASK = "task"
SUMS = "sums"
"""Preset of the worlds with secure sums."""
BUDGETS = "budgets"
"""Preset of the worlds with differential privacy."""
CALM = Faults()
EVENLY = CohortConfig()
ASYNCHRONOUS = 0.4
"""Share of the worlds with an asynchronous run."""
PARTED = 0.4
"""Share of the worlds with updates in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The parameters of one world."""

    rules: RunRules
    num_clients: int
    cohort: CohortConfig = EVENLY
    faults: Faults = CALM
    server_lease: Seconds = 10.0
    client_lease: Seconds = 10.0
    train: Seconds = 20.0
    """Training time of the median client; clients differ by `spread`, rounds a little."""
    spread: float = 0.5
    upload: Seconds = 2.0
    latency: Seconds = 0.1
    write: Seconds = 0.02
    fold: Seconds = 1.0
    draw: Seconds = 0.05
    pause: Seconds = 0.0
    unmeasured: float = 0.0
    """Share of the versions that the server cannot evaluate."""
    base_repeats_max: int = 2
    """Sums from one version that a site signs at most."""
    parts: int = 0
    """Largest number of parts of an update; each life of an agent has its own number. 0: no agent has parts."""

    def sums_of(self, version: Version) -> Sums | None:
        """Return the evaluation of a version on the server's data, the same each time; None: it fails."""
        rng = random.Random(f"measure {self.rules.seed} {version}")
        return None if rng.random() < self.unmeasured else {"loss": (rng.randint(1, 6) / 2, 1.0)}


def random_policy(rng: random.Random) -> StragglerPolicy:
    """Draw every field of the straggler policy."""
    pick = rng.choice
    cohort_size = rng.randint(1, 5)
    count = rng.randint(1, cohort_size)
    deadline_min = pick([2.0, 10.0])
    return StragglerPolicy(
        cohort_size=cohort_size,
        over_selection=pick([1.0, 1.0, 1.3, 1.5, 2.0]),
        quorum=pick([1, count, round(count / cohort_size, 3), 1.0, 0.5]),
        deadline=pick([20.0, 40.0, 90.0, "adaptive"]),
        adaptive_margin=pick([1.0, 1.5, 3.0]),
        deadline_min=deadline_min,
        deadline_max=pick([15.0, 60.0, 120.0]),
        linger=pick([None, None, 0.0, 3.0, 15.0]),
        grace=pick([0.0, 0.0, 5.0, 20.0]),
        late=pick(["discard", "next_round", "next_round"]),
        max_staleness=pick([0, 1, 1, 2, 4]),
        staleness_exponent=pick([0.0, 0.5, 1.0]),
        partial_work=pick(["refuse", "accept", "scaled"]),
        retry=pick([0, 2, 4, 6]),
        outage_max=pick([0.0, 5.0, 60.0, 3600.0]),
        min_available=pick([0, 0, cohort_size, cohort_size + 2]),
        selection_timeout=pick([5.0, 20.0, 60.0, 600.0]),
        first_available=pick([0, 0, cohort_size + 1, cohort_size + 3]),
        max_examples=1000,
    )


def random_discount(rng: random.Random) -> dict[str, Any]:
    """Draw the discount of stale updates."""
    pick = rng.choice
    return pick(
        [
            {"staleness": "polynomial", "staleness_exponent": pick([0.0, 0.5, 1.0])},
            {"staleness": "constant"},
            {"staleness": "hinge", "hinge_slope": pick([0.5, 10.0]), "hinge_delay": pick([0, 1, 4])},
        ]
    )


def random_asynchronous_policy(rng: random.Random) -> StragglerPolicy:
    """Draw every field of the policy of an asynchronous run."""
    pick = rng.choice
    size = pick([1, *range(1, 5)])
    fedbuff: dict[str, Any] = {"mode": "fedbuff", "buffer_size": size}
    fedasync: dict[str, Any] = {"mode": "fedasync", "alpha": pick([0.3, 0.6, 1.0])}
    return StragglerPolicy(
        **pick([fedbuff, fedasync] if size == 1 else [fedbuff]),
        **random_discount(rng),
        quorum=pick([1, rng.randint(1, size), 0.5, 1.0]),
        concurrency=rng.randint(1, 6),
        fill_timeout=pick([15.0, 60.0, 240.0]),
        deadline=pick([20.0, 40.0, 90.0, "adaptive"]),
        adaptive_margin=pick([1.0, 1.5, 3.0]),
        deadline_min=pick([2.0, 10.0]),
        deadline_max=pick([15.0, 60.0, 120.0]),
        max_staleness=pick([0, 1, 2, 4, 20]),
        partial_work=pick(["refuse", "accept", "scaled"]),
        retry=pick([0, 2, 4, 6]),
        outage_max=pick([0.0, 5.0, 60.0, 3600.0]),
        max_examples=1000,
    )


def with_random_waits(policy: StragglerPolicy, rng: random.Random) -> StragglerPolicy:
    """Draw the waits after failures, in half of the worlds, from a generator of their own: other draws stay."""
    pick = rng.choice
    waits: dict[str, Any] = {"retry_wait": 0.0, "failure_rest": 0.0, "approval_wait": 0.0}
    if rng.random() < 0.5:
        waits = {
            "retry_wait": pick([0.0, 2.0, 10.0]),
            "retry_wait_max": pick([10.0, 15.0, 600.0]),
            "failure_rest": pick([0.0, 5.0, 30.0]),
            "failure_rest_max": pick([30.0, 40.0, 600.0]),
            "approval_wait": pick([0.0, 30.0, 3600.0]),
            "on_failure": pick(["fail", "pause"]),
        }
    return policy.model_copy(update=waits)


def with_random_wait(rules: RunRules, num_clients: int, rng: random.Random) -> RunRules:
    """Draw the wait for clients, in half of the worlds; one without end needs clients that can make the quorum."""
    endless = [None, None] if num_clients >= rules.policy.quorum_count else []
    pauses = WaitRules(rng.choice([30.0, 600.0, 7200.0, *endless]))
    wait = rng.choice([pauses, replace(pauses, then="fail")])
    return rules if rng.random() < 0.5 else replace(rules, wait=wait)


def with_random_measures(rules: RunRules, rng: random.Random) -> RunRules:
    """Draw the metrics that decide about a run, in half of the worlds, from a generator of their own."""
    pick = rng.choice
    sources: list[Source] = []
    if rules.evaluate_server_every:
        sources.append("server")
    if rules.evaluate_clients_every:
        sources.append("clients")
    if not sources or rng.random() < 0.3:
        return rules
    best, watched = (WatchedMetric("loss", pick(sources), pick(["max", "min"])) for _ in range(2))
    patience, target = pick([(1, None), (2, None), (3, None), (0, 1.0), (2, 2.5)])
    stop = EarlyStop(watched, patience, min_delta=pick([0.0, 0.0, 0.6]), target=target)
    kinds = pick([(best, None), (None, stop), (best, stop)])
    return replace(rules, best=kinds[0], stop=kinds[1])


def random_learning_cohort(rng: random.Random, policy: StragglerPolicy) -> CohortConfig:
    """Draw a sampler that uses the losses of updates."""
    pick = rng.choice
    if rng.random() < 0.4:
        most = policy.concurrency if policy.is_asynchronous else policy.num_invited
        return CohortConfig(sampler="power_of_choice", candidates=most + rng.randint(0, 3))
    return CohortConfig(
        sampler="oort",
        exploration=pick([None, 0.0, 0.3, 1.0]),
        exploration_decay=pick([None, 0.5, 1.0]),
        exploration_min=pick([None, 0.0, 1.0]),
        penalty=pick([None, 0.0, 10.0]),
        patience=pick([None, 0.1, 0.7, 1.0]),
        patience_step=pick([None, 0.0, 1.0]),
        pacer_window=pick([None, 1, 1, 2, 3]),
    )


def random_scenario(seed: int, preset: str = "standard") -> Scenario:
    """Draw the scenario of a seed: rules over all fields of the policy, clients, and the preset's faults."""
    if preset == SUMS:
        return secure_scenario(seed)
    if preset == BUDGETS:
        return private_scenario(seed)
    scenario, rng = _random_scenario(seed, preset), random.Random(f"modes {seed}")
    rules, policy = scenario.rules, scenario.rules.policy
    if rng.random() < ASYNCHRONOUS:
        policy = random_asynchronous_policy(rng)
        num_clients = rng.randint(1, policy.concurrency + 3)
        rules = replace(rules, policy=policy, rounds=rng.randint(5, 8))
        scenario = replace(scenario, num_clients=num_clients)
    elif rng.random() < 0.3:
        fields = policy.model_dump(exclude={"staleness_exponent"})
        rules = replace(rules, policy=StragglerPolicy(**(fields | random_discount(rng))))
    cohort = scenario.cohort if rng.random() < 0.6 else random_learning_cohort(rng, policy)
    policy = with_random_waits(rules.policy, random.Random(f"waits {seed}"))
    rules = replace(rules, policy=policy, pacer_window=cohort.window_of_the_pacer)
    rules = with_random_wait(rules, scenario.num_clients, random.Random(f"wait {seed}"))
    measures, parts = random.Random(f"measures {seed}"), random.Random(f"parts {seed}")
    return replace(
        scenario,
        rules=with_random_measures(rules, measures),
        cohort=cohort,
        parts=parts.choice([2, 4]) if parts.random() < PARTED else 0,
        unmeasured=measures.choice([0.0, 0.0, 0.3]),
    )


def secure_scenario(seed: int) -> Scenario:
    """Draw the scenario of a run with secure sums, with all faults: a cohort of at least three, in small sessions."""
    drawn, rng = _random_scenario(f"sums {seed}", "standard"), random.Random(f"sums {seed}")
    pick = rng.choice
    size = rng.randint(3, 7)
    fields = drawn.rules.policy.model_dump() | {
        **{"cohort_size": size, "over_selection": 1.0, "quorum": pick([3, 3, 1.0]), "linger": pick([None, None, 15.0])},
        **{"late": "discard", "partial_work": "refuse", "staleness_exponent": 0.5, "deadline": pick([60.0, 120.0])},
        **{"min_available": pick([0, 0, size]), "first_available": 0, "failure_rest": pick([0.0, 5.0])},
    }
    secure = SecureRules(
        clip_norm=1.0,
        threshold=pick(["two_thirds", "two_thirds", "3", str(size)]),
        session_max=pick([64, 64, 4]),
        sessions=pick([1, 1, 2]),
        stage_timeout=pick([5.0, 20.0, 60.0]),
        attempts=rng.randint(1, 3),
    )
    rules = replace(
        drawn.rules,
        policy=StragglerPolicy(**fields),
        rounds=rng.randint(1, 3),
        secure=secure,
        evaluate_clients_every=0,
    )
    parts, base_repeats = pick([0, 0, 2, 4]), pick([2, 9])
    num_clients, train = size + rng.randint(0, 2), pick([3.0, 8.0])
    world: dict[str, Any] = {"rules": rules, "num_clients": num_clients, "train": train, "parts": parts}
    # Strangers send updates in the names of clients, which no certificate allows; the oracle knows masked ones alone.
    return replace(drawn, **world, base_repeats_max=base_repeats, faults=replace(drawn.faults, strangers=0))


def private_scenario(seed: int) -> Scenario:
    """Draw the scenario of a private run, with all faults: plain or in secure sums, for one to six uses of a client."""
    rng = random.Random(f"budgets {seed}")
    pick = rng.choice
    is_secure = rng.random() < 0.4
    drawn = secure_scenario(seed) if is_secure else random_scenario(seed)
    z, delta, uses = pick([0.7, 1.5, 4.0]), 1e-5, rng.randint(1, 6)
    is_of_examples = drawn.rules.policy.is_asynchronous or rng.random() < 0.3
    steps = pick([1, 7]) if is_of_examples else 1
    epsilon = epsilon_of(math.sqrt(uses * steps) / z, delta) * 1.001
    limits = epsilon, delta, z, 1.0, rng.randint(1, 6)
    privacy = PrivacyRules(*limits, mu_within(epsilon, delta) ** 2)
    if is_of_examples:
        privacy = ExampleRules(*limits, uses * steps, sample_rate=1.0, steps=steps, epsilon_last=epsilon)
    elif is_secure and rng.random() < 0.5:
        privacy = SharedRules(*limits, privacy.spent_max, honest_min=pick([2, 3]), colluders=1)
    policy, secure = drawn.rules.policy, drawn.rules.secure
    fewest = privacy.sum_min
    if secure is not None:
        secure = replace(secure, sum_min=fewest)
        size, quorum = max(policy.cohort_size, fewest), max(policy.quorum_count, fewest)
        policy = policy.model_copy(update={"cohort_size": size, "quorum": quorum, "min_available": 0})
    policy = policy.model_copy(update={"late": "discard", "partial_work": "refuse"})
    rules = replace(
        drawn.rules,
        policy=policy,
        rounds=rng.randint(3, 12),
        secure=secure,
        privacy=privacy,
        evaluate_clients_every=0,
        best=None,
        stop=None,
        pacer_window=0,
    )
    num_clients = max(drawn.num_clients, policy.num_invited) + rng.randint(0, 3)
    scenario = replace(drawn, rules=rules, num_clients=num_clients, cohort=EVENLY)
    return _with_other_noise(scenario, random.Random(f"noise {seed}"))


def _with_other_noise(scenario: Scenario, rng: random.Random) -> Scenario:
    """Draw, in half of the worlds that may have it, noise that is correlated or that sites share for examples."""
    rules, privacy = scenario.rules, scenario.rules.privacy
    if privacy is None or rng.random() < 0.5:
        return scenario
    epsilon_1 = epsilon_of(1 / privacy.noise_multiplier, privacy.delta) * 1.001  # of a single use or step
    limits = epsilon_1, privacy.delta, privacy.noise_multiplier, 1.0
    if type(privacy) is PrivacyRules and rules.secure is None:
        apart = rng.randint(1, 3)
        most = min(privacy.participations_max, -(-rules.rounds // apart))
        spent_max = mu_within(epsilon_1, privacy.delta) ** 2
        of_run: dict[str, Any] = {"rounds": rules.rounds, "apart": apart, "bands": rng.randint(1, min(4, rules.rounds))}
        num_clients = max(scenario.num_clients, rules.policy.num_invited * apart + rng.randint(0, 2))
        rules = replace(rules, privacy=CorrelatedRules(*limits, most, spent_max, **of_run))
        return replace(scenario, rules=rules, num_clients=num_clients)
    if type(privacy) is ExampleRules and rules.secure is not None:
        uses, honest = rng.randint(1, 6), rng.choice([2, 3])
        epsilon = epsilon_of(math.sqrt(uses) / privacy.noise_multiplier, privacy.delta) * 1.001
        of_steps: dict[str, Any] = {"sample_rate": 1.0, "steps": 1, "epsilon_last": epsilon}
        of_steps |= {"honest_min": honest, "colluders": 1}
        most = privacy.participations_max
        shared = SharedExampleRules(epsilon, *limits[1:], most, uses, **of_steps)
        fewest, policy = shared.sum_min, rules.policy
        size, quorum = max(policy.cohort_size, fewest), max(policy.quorum_count, fewest)
        policy = policy.model_copy(update={"cohort_size": size, "quorum": quorum})
        rules = replace(rules, policy=policy, secure=replace(rules.secure, sum_min=fewest), privacy=shared)
        return replace(scenario, rules=rules, num_clients=max(scenario.num_clients, policy.num_invited))
    return scenario


def _random_scenario(seed: int | str, preset: str) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    pick = rng.choice
    policy = random_policy(rng)
    rules = RunRules(
        policy=policy,
        rounds=rng.randint(4, 6),
        seed=rng.randrange(1000),
        evaluate_server_every=pick([0, 0, 1, 2]),
        evaluate_clients_every=pick([0, 0, 1, 2]),
        evaluate_clients_max=pick([0, 1, 3]),
        evaluation_deadline=pick([3.0, 15.0]),
    )
    needed = max(policy.num_invited, policy.min_available)
    fewer = max(1, policy.quorum_count - 1)
    return Scenario(
        rules=rules,
        num_clients=rng.randint(needed, needed + 3) if rng.random() < 0.8 else rng.randint(fewer, needed),
        cohort=CohortConfig(sampler=pick(["uniform", "weighted", "stratified"])),
        faults=random_faults(random.Random(f"faults {seed}"), preset),
        server_lease=pick([4.0, 10.0, 30.0]),
        client_lease=pick([2.0, 10.0, 30.0]),
        train=pick([3.0, 8.0, 20.0]),
        spread=pick([0.1, 0.5, 0.8]),
        upload=pick([0.2, 2.0, 10.0]),
        latency=pick([0.01, 0.1, 1.0]),
        write=pick([0.0, 0.02, 0.3]),
        fold=pick([0.1, 2.0, 15.0]),
        draw=pick([0.0, 0.05, 12.0]),
        pause=pick([0.0, 0.0, 3.0]),
    )


def calm(rules: RunRules, num_clients: int) -> Scenario:
    """Return the scenario of a world without faults."""
    return replace(Scenario(rules=rules, num_clients=num_clients), faults=CALM)
