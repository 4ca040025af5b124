"""The settings of a run, and its TOML file, which may also hold the coordinator's table.

The string under a field is its documentation: `docs/configuration.md` is generated from these strings.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from atoll.ground.faults import Refused
from atoll.plugins.reference import check_reference
from atoll.protocol.notices.settings import NotifyConfig
from atoll.protocol.settings import STRICT, Plain
from atoll.protocol.variants import Given
from atoll.server.config import example_privacy
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.config.example_privacy import STEPS_MISSING, ExampleTerms, given_of, rules_of
from atoll.server.config.extensions import CUSTOM_SAMPLER
from atoll.server.config.kinds import COHORT_SAMPLERS, make_sampler
from atoll.server.config.model import ModelConfig, StopConfig, faults_of_watching
from atoll.server.config.privacy import PrivacyConfig
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.schedule import ScheduleConfig, faults_of_optimizer, optimizer_at
from atoll.server.config.secure import SecureConfig
from atoll.server.exchanges.rules import ExchangeRules
from atoll.server.members.oort_pacer import PACER_WINDOW
from atoll.server.rounds.policy import Seconds, SecondsOrNone, StragglerPolicy
from atoll.server.rounds.privacy_rules import PrivacyRules
from atoll.server.rounds.run_rules import RunRules, Source, WaitRules
from atoll.server.rounds.secure_rules import SecureRules
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler
from atoll.task.apps import is_app
from atoll.task.given import FROZEN, OPTION, PRIVACY

Reference = Annotated[str, AfterValidator(check_reference)]
"""Reference to code, which `plugins.reference` resolves."""

_NAME = re.compile(r"[a-z0-9_-]{1,64}")

UNEVALUATED_MAX = 4
"""Number of versions waiting for the `evaluate_fn` of a Flower app, which measures each of them, at which rounds wait,
too."""


Share = Annotated[float, Field(gt=0, le=1)]


class CohortConfig(BaseModel, **STRICT):
    """Selection of clients for a round."""

    sampler: Annotated[str, AfterValidator(CUSTOM_SAMPLER.check)] = "uniform"
    """Sampler of cohorts from the available clients: "uniform"; "weighted" by the size of their training data;
    "stratified" by their label; "power_of_choice" (Cho et al. 2020): the largest losses among some drawn clients;
    "oort" (Lai et al. 2021): high utility and short round time. Or a custom function of (candidates, count, rng): by
    the name that an installed package declares (see `atoll plugins`), or as `module:function` or
    `path/to/file.py:function`."""

    candidates: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Clients that "power_of_choice" draws, weighted by the size of their data, before it invites those with the
    largest losses. At least the number of invited clients; with exactly that number it is "weighted"; absent: refused
    by the sampler, because there is no default."""

    exploration: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the first cohort that "oort" gives to clients that have not reported yet; absent: 0.9."""

    exploration_decay: Share | None = None
    """Factor of `exploration` from round to round in "oort"; absent: 0.98."""

    exploration_min: Annotated[float, Field(ge=0, le=1)] | None = None
    """Lowest value of `exploration` in "oort", whatever the round; absent: 0.2."""

    penalty: Annotated[float, Field(ge=0, le=10)] | None = None
    """Exponent of the factor (T / t) in "oort", for a client whose rounds take t > T seconds; absent: 2."""

    patience: Share | None = None
    """Quantile of the clients' round times that is T in "oort"; 1: no client counts as slow; absent: 0.3."""

    patience_step: Annotated[float, Field(ge=0, le=1)] | None = None
    """Increase of `patience` in "oort" after a window of rounds without more utility than the last; absent: 0.05."""

    pacer_window: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Rounds in a window after which "oort" may raise its `patience`; absent: 20."""

    @model_validator(mode="after")
    def _only_what_the_sampler_has(self) -> "CohortConfig":
        self._options()
        return self

    def _options(self) -> Given:
        given = {name: value for name, value in self if name != "sampler"}
        return COHORT_SAMPLERS.pick(self.sampler, given)

    def faults_of_rounds(self, policy: StragglerPolicy) -> Iterator[str]:
        """Yield the faults of a straggler policy that this sampler cannot support."""
        most = policy.concurrency if policy.is_asynchronous else policy.num_invited
        if self.candidates is not None and self.candidates < most:
            yield f"cohort: candidates {self.candidates} is less than the {most} that may be invited at once"

    @property
    def is_ours(self) -> bool:
        """Return whether the sampler is a built-in one."""
        return self.sampler in COHORT_SAMPLERS.variants

    @property
    def window_of_the_pacer(self) -> int:
        """The number of rounds in a window of the pacer; 0: the sampler has no pacer."""
        return (self.pacer_window or PACER_WINDOW) if self.sampler == "oort" else 0

    def build(self) -> Sampler | Oort:
        """Make the client sampler of these settings.

        Raises:
            ConfigError: there is no such custom sampler.
        """
        return make_sampler(self.sampler, self._options()) if self.is_ours else CUSTOM_SAMPLER.load(self.sampler)


class EvaluationConfig(BaseModel, **STRICT):
    """Evaluation of versions, on the server's data and by the clients."""

    server_every: int = Field(default=1, ge=0, le=1_000_000)
    """Interval, in versions, of the evaluations on the server's test data, if the task has any; the last version is
    always evaluated. 0: never."""

    clients_every: int = Field(default=0, ge=0, le=1_000_000)
    """Interval, in versions, of the evaluations by the clients, on their test data; the last version is always
    evaluated. 0: never."""

    clients_max: int = Field(default=0, ge=0, le=1_000_000)
    """Largest number of clients that evaluate a version; 0: all connected ones."""

    deadline: Seconds = 60.0
    """Seconds for the clients' answers; later answers do not count."""

    keep_sites: int = Field(default=100, ge=0, le=1_000_000)
    """Number of the newest versions whose metrics of single sites are kept, in addition to the best version's; 0: none.
    Only sites whose policy lets them leave have such metrics (`metrics = "per_site"`)."""


class ProgramConfig(BaseModel, **STRICT):
    """Server program of a run of messages: custom code decides what is sent to which site, and what follows."""

    main: Reference | Literal[""] = ""
    """Function that is called with the grid of the run, `module:function` or `path/to/file.py:function`; or a Flower
    app, `path/to/pyproject.toml:app`. With one, the run has no rounds: it ends when the function returns, and only
    these settings of this file are used: `name`, `task`, `seed`, `local`; for each exchange of messages `round.quorum`,
    `round.linger` and `round.grace`; and `round.min_available`, for which its first query of the nodes waits. Empty: a
    run of rounds."""

    native: bool = False
    """Native run of a Flower app: its strategy becomes a run of rounds, with the settings of this file, and `main()`
    continues after the last one. False: the app runs hosted, see `main`."""

    reply_max: int = Field(default=2**40, ge=1, le=2**50)
    """Largest size of a reply [bytes]; a larger one is an error of its site."""

    keep_replies: int = Field(default=0, ge=0, le=2**31)
    """Newest exchanges whose replies stay on disk while the run continues; a program that is killed after more
    exchanges cannot be repeated, and the run fails. 0: all are kept, for a repetition."""

    deadline_max: Seconds = 43200.0
    """Longest time that an exchange waits for replies [s], whatever the function asks for."""


class WaitConfig(BaseModel, **STRICT):
    """Wait of a run for absent sites that its quorum needs, or for disk space of the coordinator or a rank.

    It is not a failure and uses no retry.
    """

    most: Seconds | None = None
    """Longest wait of a round for its clients, from the end of `round.selection_timeout` on, and of a run for disk
    space [s]; absent: unlimited, with a line in the log each hour. A simulation does not wait: there
    a round without clients is abandoned."""

    then: Literal["pause", "fail"] = "pause"
    """What follows a wait of `most` seconds: "pause": the run is paused, and resumes by itself when enough clients are
    back, or when there is disk space; "fail": it fails."""


class RunConfig(BaseModel, **STRICT):
    """Settings of one run: its task, its length and its rules."""

    short_tables: ClassVar[Mapping[str, tuple[str, str]]] = {"task": ("reference", "options")}
    """Strings that may be written as a table: the key of the string in it, and the field for its other keys."""

    dotted_names: ClassVar[Mapping[str, int]] = {"options": 0}
    """Fields that hold values by name, where a name may include tables: the level of the names."""

    name: str = "run"
    """Name of the run: 1 to 64 of the characters a-z, 0-9, - and _."""

    task: Reference
    """Task: `module:attribute` or `path/to/file.py:attribute`; the first argument on the command line. As a table,
    `[task]`: its `reference`, and the values of `options`."""

    options: dict[str, Plain] = {}
    """Values of the task's `options`, checked by the task: the other keys of the table `[task]`, such as `smoothing =
    0.1`, or `--set task.smoothing=0.1`."""

    program: ProgramConfig = ProgramConfig()
    """Server program of a run of messages."""

    rounds: int = Field(default=10, ge=1, le=2**31)
    """Commits after which the run is finished; abandoned rounds do not count."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial model, of every cohort and of every client's seed."""

    pause: SecondsOrNone = 0.0
    """Seconds between the end of a round and the beginning of the next."""

    round: StragglerPolicy = StragglerPolicy()
    """Size, quorum and deadlines of a round."""

    wait: WaitConfig = WaitConfig()
    """Wait for absent sites."""

    cohort: CohortConfig = CohortConfig()
    """Selection of clients for a round."""

    aggregation: AggregationConfig = AggregationConfig()
    """Aggregation of a round's updates."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Server optimizer."""

    local: dict[str, Plain | list[Plain]] = {}
    """Overrides of the task's `Local`, such as `lr = 0.05`: plain values, checked by the task."""

    schedule: ScheduleConfig = ScheduleConfig()
    """Settings that change over the rounds."""

    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation of versions."""

    model: ModelConfig = ModelConfig()
    """Start of the model, and its versions that are kept on disk."""

    stop: StopConfig = StopConfig()
    """Early end of a run by a metric."""

    secure: SecureConfig | None = None
    """Secure sums; absent: the coordinator sees each update."""

    privacy: PrivacyConfig | None = None
    """Differential privacy; absent: the versions have no guarantee."""

    @property
    def given(self) -> dict[str, Any]:
        """Values that the run gives to its task, as they are sent: see `task.given`."""
        frozen = {FROZEN: self.model.frozen} if self.model.frozen else {}
        options = {f"{OPTION}{name}": value for name, value in self.options.items()}
        return {**self._local_values, **options, **frozen, **self._privacy_terms}

    @property
    def _privacy_terms(self) -> dict[str, Any]:
        """What sites must know and approve of the differential privacy, as they are told."""
        if self.privacy is None:
            return {}
        terms = self.example_terms
        bits = 0 if self.secure is None else self.secure.bits
        told = self.privacy.told(self.rounds) if terms is None else given_of(terms, bits)
        return {f"{PRIVACY}{name}": value for name, value in told.items()}

    @property
    def _local_values(self) -> dict[str, Any]:
        """The values for the task's `Local`, with a table for each schedule."""
        schedules = {
            key: schedule.table(self.rounds, self.local.get(key)) for key, schedule in self.schedule.local.items()
        }
        return {**self.local, **schedules}

    @property
    def example_terms(self) -> ExampleTerms | None:
        """The terms of a guarantee for examples; None: there is none."""
        return None if self.privacy is None else self.privacy.of_examples(self._local_values, self.rounds)

    @property
    def _privacy_rules(self) -> PrivacyRules | None:
        if self._hides_clients:
            assert self.privacy is not None
            if self.secure is None or not self.privacy.is_shared:
                return self.privacy.rules(self.rounds, self.round.cohort_size)
            honest = self.privacy.honest_of(self.secure.rules(), self.round.cohort_size)
            return self.privacy.rules(self.rounds, self.round.cohort_size, honest)
        if (terms := self.example_terms) is None:
            return None
        if not terms.batch or self.privacy is None or self.secure is None:
            return rules_of(terms)
        honest = self.privacy.honest_of(self.secure.rules(), self.round.cohort_size)
        return rules_of(terms, honest, self.privacy.colluders_assumed)

    @property
    def local_text(self) -> str:
        """The values that the run gives to its task, as invitations have them [JSON object]."""
        return json.dumps(self.given, sort_keys=True)

    def optimizer_at(self, version: int) -> OptimizerConfig:
        """Return the settings of the server optimizer for the step to a version."""
        return optimizer_at(self.optimizer, self.schedule.optimizer, version, rounds=self.rounds)

    @property
    def is_of_messages(self) -> bool:
        """Return whether this is a run of messages."""
        return bool(self.program.main)

    @property
    def exchange_rules(self) -> ExchangeRules:
        """The rules for the machine of a run of messages."""
        policy = self.round
        return ExchangeRules(
            quorum=1.0 if policy.linger is None else min(1.0, policy.quorum_count / policy.num_wanted),
            linger=policy.linger or 0.0,
            deadline_max=self.program.deadline_max,
            grace=policy.grace,
            outage_max=policy.outage_max,
            keep_replies=self.program.keep_replies,
        )

    @property
    def rules(self) -> RunRules:
        """The rules for the run's machine."""
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
            best=self.model.metric,
            stop=self.stop.rule,
            keep_sites=evaluation.keep_sites if self.secure is None and not self._hides_clients else 0,
            weighs=self.aggregation.weighs,
            unevaluated_max=UNEVALUATED_MAX if is_app(self.task) else 0,
            wait=WaitRules(self.wait.most, self.wait.then),
            secure=self.secure_rules,
            privacy=self._privacy_rules,
        )

    @property
    def secure_rules(self) -> SecureRules | None:
        """The rules of secure sums, with those of their privacy; None: updates are plain."""
        has_noise = self.privacy is not None and (self._hides_clients or self.privacy.is_shared)
        if self.secure is None or self.privacy is None or not has_noise:
            return None if self.secure is None else self.secure.rules()
        return self.privacy.of_sums(self.secure.rules(), self.rounds, self.round.cohort_size)

    @model_validator(mode="after")
    def _tables_fit_together(self) -> "RunConfig":
        faults = [*self._faults_of_fedasync()] if self.round.mode == "fedasync" else []
        faults += [*self._faults_of_native()] if self.program.native else []
        faults += [*self._faults_of_secure(self.secure)] if self.secure is not None else []
        faults += [*self._faults_of_privacy(self.privacy)] if self.privacy is not None else []
        faults += [*self.aggregation.faults_of_rounds(self.round), *self.cohort.faults_of_rounds(self.round)]
        faults += [*self._faults_of_growth()] if self.aggregation.grows else []
        evaluation = self.evaluation
        of_clients = 1 if self._hides_clients else evaluation.clients_every  # [privacy] has its fault by itself
        every: dict[Source, int] = {"server": evaluation.server_every, "clients": of_clients}
        faults += faults_of_watching(self.model, self.stop, every=every)
        faults += faults_of_optimizer(self.optimizer, self.schedule.optimizer, self.rounds)
        faults += self._faults_of_schedules()
        if faults:
            raise Refused(*faults)
        return self

    def _faults_of_secure(self, secure: SecureConfig) -> Iterator[str]:
        """Yield the settings of other tables that secure sums exclude."""
        evaluation = self.evaluation
        kept = EvaluationConfig.model_fields["keep_sites"].default
        if self.program.native:  # its settings come from a strategy, which has no such setting
            kept = evaluation.keep_sites
        yield from secure.faults_of_program(self.program.main)
        yield from secure.faults_of_rounds(self.round)
        yield from secure.faults_of_aggregation(self.aggregation)
        yield from secure.faults_of_sampler(self.cohort.sampler)
        yield from secure.faults_of_evaluation(
            evaluation.clients_every, evaluation.clients_max, evaluation.keep_sites, kept
        )
        yield from secure.faults_of_watching(self.model, self.stop)
        yield from secure.statistics.faults() if secure.statistics is not None else ()
        frozen = {FROZEN: "0" * 64}  # which the settings have once version 0 is written
        yield from secure.faults_of_local(json.dumps({**self.given, **frozen}, sort_keys=True))

    def _faults_of_privacy(self, privacy: PrivacyConfig) -> Iterator[str]:
        """Yield the settings of other tables that a guarantee for clients or examples excludes."""
        yield from privacy.faults_of_unit()
        yield from privacy.faults_of_mechanism(self.rounds, is_secure=self.secure is not None)
        yield from privacy.faults_of_clip(self.rounds, self.round.cohort_size, is_secure=self.secure is not None)
        if privacy.unit == "example":
            yield from self._faults_of_examples()
            return
        yield from privacy.faults_of_budget(self.rounds, self.round.cohort_size)
        yield from privacy.faults_of_secure(self.secure, self.round, self.rounds)
        yield from privacy.faults_of_program(self.program.main)
        yield from privacy.faults_of_rounds(self.round, self.rounds)
        yield from privacy.faults_of_aggregation(self.aggregation)
        yield from privacy.faults_of_sampler(self.cohort.sampler)
        kept = EvaluationConfig.model_fields["keep_sites"].default
        yield from privacy.faults_of_evaluation(self.evaluation.clients_every, self.evaluation.keep_sites, kept)
        yield from privacy.faults_of_watching(self.model, self.stop)

    def _faults_of_examples(self) -> Iterator[str]:
        """Yield the settings of other tables that a guarantee for examples excludes."""
        terms = self.example_terms
        of_budget = [*example_privacy.faults_of_budget(terms)] if terms is not None else []
        if terms is not None:
            yield from of_budget
        elif self.privacy is not None and self.privacy.sample_rate is not None:
            yield STEPS_MISSING
        yield from example_privacy.faults_of_program(self.program.main, is_app=is_app(self.task))
        yield from example_privacy.faults_of_rounds(self.round.late)
        yield from example_privacy.faults_of_sampler(self.cohort.sampler)
        assert self.privacy is not None
        if self.privacy.is_shared:
            yield from self._faults_of_shared_steps(self.privacy, has_budget=terms is not None and not of_budget)
        else:
            yield from example_privacy.faults_of_aggregation(self.aggregation)
            yield from self.privacy.faults_of_own_noise()

    def _faults_of_shared_steps(self, privacy: PrivacyConfig, *, has_budget: bool) -> Iterator[str]:
        """Yield the settings that a guarantee for examples excludes if the clients share the noise of one step.

        `has_budget`: whether the budget has no fault, so that the noise is known.
        """
        yield from example_privacy.faults_of_step({*self.local, *self.schedule.local}, self.local.get("max_steps"))
        if has_budget and privacy.batch is not None:
            yield from privacy.faults_of_secure(self.secure, self.round, self.rounds)
        yield from privacy.faults_of_aggregation(self.aggregation)
        kept = EvaluationConfig.model_fields["keep_sites"].default
        yield from privacy.faults_of_evaluation(self.evaluation.clients_every, self.evaluation.keep_sites, kept)
        yield from privacy.faults_of_watching(self.model, self.stop)

    @property
    def _hides_clients(self) -> bool:
        """Whether a guarantee for clients lets no value of a single client out."""
        return self.privacy is not None and self.privacy.unit == "client"

    @property
    def notices(self) -> list[str]:
        """Settings that are allowed and probably not meant, a sentence each."""
        found = [self.round.warning_of_staleness(), self.secure.notice_of_rounds(self.round) if self.secure else ""]
        return [
            line for line in (*found, *(self.privacy.notices(self.rounds, self.secure) if self.privacy else ())) if line
        ]

    def _faults_of_schedules(self) -> Iterator[str]:
        """Yield the local settings with two starts, or with a list beside a fixed value."""
        for key, schedule in self.schedule.local.items():
            if key in self.local and (schedule.start is not None or schedule.kind == "list"):
                name = "values" if schedule.kind == "list" else "start"
                yield f"schedule: local.{key}: has {name}, and local.{key} is set too: leave one out"
            elif key in self.local and type(self.local[key]) not in (int, float):
                yield f"local.{key}: must be a number where its schedule starts from it, got {self.local[key]!r}"
        if self.schedule.optimizer and self.round.mode == "fedasync":
            yield "schedule: optimizer: mode fedasync has only its alpha, which is round.alpha"

    def _faults_of_growth(self) -> Iterator[str]:
        """Yield the settings of an optimizer, which a growing model does not have."""
        if self.optimizer != OptimizerConfig():
            yield "optimizer: rule concatenate appends rows, and takes no step: leave it out"
        if self.schedule.optimizer:
            yield "schedule: optimizer: rule concatenate appends rows, and takes no step: leave it out"

    def _faults_of_native(self) -> Iterator[str]:
        if self.program.main:
            yield "program.native is for a run of rounds: leave it out, or program.main"
        if not is_app(self.task):
            yield f"program.native is for Flower apps, and task = {self.task!r} is not one: leave it out"

    def _faults_of_fedasync(self) -> Iterator[str]:
        """Yield the settings that mode fedasync excludes: its step is one update, mixed in by alpha."""
        if self.optimizer != OptimizerConfig():
            yield "optimizer: mode fedasync has only its alpha, which is round.alpha"
        if self.aggregation.rule != "mean":
            yield f"aggregation: {self.aggregation.rule} is for several updates, mode fedasync applies one by one"

    @field_validator("name")
    @classmethod
    def _name_is_plain(cls, name: str) -> str:
        if _NAME.fullmatch(name) is None:
            raise ValueError("allowed: 1 to 64 of the characters a-z, 0-9, - and _")
        return name


class RunFile(RunConfig):
    """TOML file of a run: the run's keys, and the coordinator's tables."""

    coordinator: CoordinatorConfig = CoordinatorConfig()
    """The coordinator's process."""

    notify: NotifyConfig = NotifyConfig()
    """Notification of the operator by the coordinator."""

    @property
    def run(self) -> RunConfig:
        """Settings of the run alone, as the journal records them."""
        return RunConfig(**{name: getattr(self, name) for name in RunConfig.model_fields})
