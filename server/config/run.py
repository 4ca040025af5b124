"""The settings of a run and of the coordinator's process. One TOML file may hold both.

The string under a field is its documentation; `docs/configuration.md` is held against these strings by a test.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.protocol.reference import Reference, check_known_or_reference
from atoll.protocol.settings import STRICT
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.config.process import CoordinatorConfig
from atoll.server.rounds.oort_pacer import PACER_WINDOW
from atoll.server.rounds.policy import Seconds, SecondsOrNone, StragglerPolicy
from atoll.server.rounds.update_intake import RunRules
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import SAMPLERS, Sampler, load_sampler, power_of_choice

_NAME = re.compile(r"[a-z0-9_-]{1,64}")


Finite = Annotated[float, Field(allow_inf_nan=False)]
Plain = bool | int | Finite | str
"""A value that travels in an invitation; nothing in it can be executed."""


NAMES = (*SAMPLERS, "power_of_choice", "oort")
"""The samplers that are known by name."""

COHORT_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "power_of_choice": {"candidates": True},
    "oort": dict.fromkeys(
        (
            "exploration",
            "exploration_decay",
            "exploration_min",
            "penalty",
            "patience",
            "patience_step",
            "pacer_window",
        ),
        False,
    ),
}
"""The options of each sampler that has any, and whether it must have them."""

Share = Annotated[float, Field(gt=0, le=1)]


class CohortConfig(BaseModel):
    """Who is chosen."""

    model_config = STRICT

    sampler: str = "uniform"
    """How a cohort is drawn from the available clients: "uniform"; "weighted" by the size of their training data;
    "stratified" by their label; "power_of_choice" (Cho et al. 2020), those with the largest losses of some that are
    drawn; "oort" (Lai et al. 2021), those with much to teach and little time to wait for; or your own
    `path/to/file.py:function` or `module:function`, called with (candidates, count, rng)."""

    candidates: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of "power_of_choice": how many are drawn, weighted by the size of their data, of whom those with the largest
    losses are invited; as many as are invited at least, and then it is "weighted"; absent: there is none, and the
    sampler asks for it."""

    exploration: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of "oort": the share of the first cohort that goes to clients that have not reported yet; absent: 0.9."""

    exploration_decay: Share | None = None
    """Of "oort": what this share is multiplied with from round to round; absent: 0.98."""

    exploration_min: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of "oort": it falls no lower; absent: 0.2."""

    penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    """Of "oort": the power of (T / t) by which a client counts less whose rounds take t > T seconds; absent: 2."""

    patience: Share | None = None
    """Of "oort": T is so long that this share of the clients that have reported make it; 1, nobody is too slow; absent:
    0.3."""

    patience_step: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of "oort": what is added to it when a window of rounds taught no more than the last one; absent: 0.05."""

    pacer_window: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Of "oort": rounds in such a window; absent: 20."""

    @field_validator("sampler")
    @classmethod
    def _known_or_reference(cls, sampler: str) -> str:
        return check_known_or_reference(sampler, NAMES, "function")

    @model_validator(mode="after")
    def _only_what_the_sampler_has(self) -> "CohortConfig":
        options = COHORT_OPTIONS.get(self.sampler, {})
        if wrong := sorted(self._given().keys() - options.keys()):
            allowed = ", ".join(sorted(options)) or "none"
            raise ValueError(f"{', '.join(wrong)} is no option of {self.sampler} (allowed: {allowed})")
        if missing := sorted(name for name, must in options.items() if must and getattr(self, name) is None):
            raise ValueError(f"{self.sampler} needs {', '.join(missing)}")
        return self

    def _given(self) -> dict[str, int | float]:
        return {name: value for name, value in self if name != "sampler" and value is not None}

    def faults_of_rounds(self, policy: StragglerPolicy) -> Iterator[str]:
        """Why these rounds do not suit the sampler."""
        most = policy.concurrency if policy.is_asynchronous else policy.num_invited
        if self.candidates is not None and self.candidates < most:
            yield f"cohort: candidates {self.candidates} is less than the {most} that may be invited at once"

    @property
    def is_ours(self) -> bool:
        """Whether the sampler is none of the user's own."""
        return self.sampler in NAMES

    @property
    def window_of_the_pacer(self) -> int:
        """Rounds; 0: there is no pacer."""
        return (self.pacer_window or PACER_WINDOW) if self.sampler == "oort" else 0

    def build(self) -> Sampler | Oort:
        """The sampler that was asked for.

        Raises:
            ConfigError: the user's own is not there.
        """
        if self.sampler == "oort":
            return Oort(**{name: value for name, value in self._given().items() if name != "pacer_window"})
        if self.candidates is not None:
            return partial(power_of_choice, num_considered=self.candidates)
        return load_sampler(self.sampler)


class EvaluationConfig(BaseModel):
    """Which versions are measured, and on whose data."""

    model_config = STRICT

    server_every: int = Field(default=1, ge=0, le=1_000_000)
    """Each n-th version is run on the server's own test data, when the task has some; 0: never."""

    clients_every: int = Field(default=0, ge=0, le=1_000_000)
    """Each n-th version is run by the clients on their own test data; 0: never."""

    clients_max: int = Field(default=0, ge=0, le=1_000_000)
    """At most this many clients are asked; 0: all who are connected."""

    deadline: Seconds = 60.0
    """Seconds that clients have for their answer; then the version's measure is what has come in."""


class RunConfig(BaseModel):
    """One run: which task, for how long, by which rules."""

    model_config = STRICT

    name: str = "run"
    """What the run is called: 1 to 64 of the characters a-z, 0-9, - and _."""

    task: Reference
    """The task: `module:attribute` or `path/to/file.py:attribute`; on the command line it stands first."""

    rounds: int = Field(default=10, ge=1, le=2**31)
    """Commits after which the run is finished; abandoned rounds do not count."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial model, every cohort and every client's own seed."""

    pause: SecondsOrNone = 0.0
    """Seconds between the end of a round and the beginning of the next."""

    round: StragglerPolicy = StragglerPolicy()
    """What a round waits for, and for how long."""

    cohort: CohortConfig = CohortConfig()
    """Who is chosen."""

    aggregation: AggregationConfig = AggregationConfig()
    """How a round's updates become one."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """How the mean of a round's updates moves the global model."""

    local: dict[str, Plain | list[Plain]] = {}
    """Overrides of the task's own `Local`, such as `lr = 0.05`: plain values, checked by the task."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Which versions are measured, and on whose data."""

    @property
    def rules(self) -> RunRules:
        """What the run's machine needs of it."""
        evaluation = self.evaluation
        return RunRules(
            policy=self.round,
            rounds=self.rounds,
            seed=self.seed,
            evaluate_server_every=evaluation.server_every,
            evaluate_clients_every=evaluation.clients_every,
            evaluate_clients_max=evaluation.clients_max,
            evaluation_deadline=evaluation.deadline,
            pacer_window=self.cohort.window_of_the_pacer,
        )

    @model_validator(mode="after")
    def _tables_fit_together(self) -> "RunConfig":
        faults = [*self._faults_of_fedasync()] if self.round.mode == "fedasync" else []
        faults += [*self.aggregation.faults_of_rounds(self.round), *self.cohort.faults_of_rounds(self.round)]
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _faults_of_fedasync(self) -> Iterator[str]:
        """Its step is defined: one update, mixed in by alpha."""
        if self.optimizer != OptimizerConfig():
            yield "optimizer: mode fedasync has none but its alpha, which is round.alpha"
        if self.aggregation.rule != "mean":
            yield f"aggregation: {self.aggregation.rule} is a rule for several updates, mode fedasync takes one by one"

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ValueError("allowed: 1 to 64 of the characters a-z, 0-9, - and _")
        return name


class RunFile(RunConfig):
    """What a run's TOML may hold: the run's keys, and beside them the coordinator's table."""

    coordinator: CoordinatorConfig = CoordinatorConfig()
    """The coordinator's process."""

    @property
    def run(self) -> RunConfig:
        """The run's part alone, as it is recorded."""
        return RunConfig(**{name: getattr(self, name) for name in RunConfig.model_fields})
