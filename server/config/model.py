"""The settings of a run's versions: the start, those to keep, the best one, the metric that ends the run early."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from atoll.protocol.settings import STRICT
from atoll.server.rounds.run_rules import EarlyStop, Source, WatchedMetric

if TYPE_CHECKING:
    from atoll.training.worker.bench import Measures

Mode = Literal["max", "min"]
MetricName = Annotated[str, Field(max_length=100)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Value = Annotated[float, Field(allow_inf_nan=False)]

OF_A_RUN, BEST = "run:", "best"
"""Prefix of a start that names a run, and the word for its best version in place of a number."""


def _metric_of(name: str, source: Source | None, mode: Mode | None) -> WatchedMetric:
    """Return a metric with default mode and source filled in."""
    return WatchedMetric(name, source or "server", mode or ("min" if name == "loss" else "max"))


def run_and_version(start: str) -> tuple[str, str] | None:
    """Return the run and the version that a start names, as `run:NAME[@VERSION]`; None: it names a file.

    The version is a number, "best", or empty for the newest one.
    """
    if not start.startswith(OF_A_RUN):
        return None
    name, _, version = start.removeprefix(OF_A_RUN).partition("@")
    return name, version


class ModelConfig(BaseModel, **STRICT):
    """Start of the model, and its versions that are kept on disk."""

    start: str = ""
    """Start of the model: a safetensors file, such as "model.safetensors" of `atoll model export` or `atoll train`, or
    "run:NAME[@VERSION]", a version of another run of the same coordinator, by default its newest one, or "best" (in a
    simulation of the state directory here, or of the joined coordinator). Names and shapes are checked; a tied tensor
    may have any of its names. Empty: the task's model."""

    strict: bool | None = None
    """Refuse a `start` that lacks a tensor of the model, or has additional ones. false: tensors that do not fit keep
    the task's values, and are listed; absent: true."""

    frozen: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the tensors that are never sent, in a task with `travels = "trained"`: a site with others is refused
    in each round (`task_mismatch`). Empty: the digest of the coordinator's tensors, which the run then has."""

    keep_versions: int | None = Field(default=None, ge=1, le=1_000_000)
    """Number of the newest versions of the model to keep; version 0, the best one and those that a round or a late
    update needs are kept, too; absent: `coordinator.keep_versions` at the time when the run begins, in a simulation
    1."""

    best: MetricName = ""
    """Metric of the best version, such as "auroc", or "loss": that version is kept, `atoll model list` marks it, and
    `atoll model export --best` exports it. If versions are equal, the first is the best. Empty: there is no best
    version."""

    mode: Mode | None = None
    """The better value of `best`: the larger ("max") or the smaller ("min"); absent: "min" for "loss", else "max"."""

    source: Source | None = None
    """The data on which `best` is measured: the server's test data, or the test data of all clients together, by the
    intervals of `evaluation`; absent: "server"."""

    @field_validator("start")
    @classmethod
    def _file_or_run(cls, start: str) -> str:
        if (named := run_and_version(start)) is None:
            return start
        if not named[0] or not (named[1] in ("", BEST) or named[1].isdecimal()) or start.endswith("@"):
            raise ValueError('allowed: a file, "run:NAME", "run:NAME@7" or "run:NAME@best"')
        return start

    @model_validator(mode="after")
    def _only_what_decides(self) -> "ModelConfig":
        _check_unused(self, "best", ("mode", "source"))
        _check_unused(self, "start", ("strict",))
        return self

    @property
    def is_strict(self) -> bool:
        """Whether a start must have all tensors of the model, and no others."""
        return self.strict is not False

    @property
    def metric(self) -> WatchedMetric | None:
        """Metric of the best version; None: there is no best version."""
        return _metric_of(self.best, self.source, self.mode) if self.best else None


class StopConfig(BaseModel, **STRICT):
    """Early end of a run by a metric; the run is then finished."""

    metric: MetricName = ""
    """Metric that may end the run before `rounds`: at its `target`, or after `patience`. Each round then waits for the
    evaluation of the previous version. Empty: no early stop."""

    mode: Mode | None = None
    """The better value of `metric`: the larger ("max") or the smaller ("min"); absent: "min" for "loss", else "max"."""

    source: Source | None = None
    """The data on which `metric` is measured: "server" or "clients", as in `model.source`; absent: "server"."""

    patience: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of consecutive evaluations without a better value after which the run ends; absent: no limit."""

    min_delta: Amount | None = None
    """Smallest improvement over the best value that counts as better; absent: 0."""

    target: Value | None = None
    """Value of `metric` at which, or beyond which, the run ends; absent: none."""

    @model_validator(mode="after")
    def _only_with_a_metric(self) -> "StopConfig":
        _check_unused(self, "metric", ("mode", "source", "patience", "min_delta", "target"))
        if self.metric and self.patience is None and self.target is None:
            raise ValueError(f"metric {self.metric!r} never ends the run: set patience, target, or both")
        if self.min_delta is not None and self.patience is None:
            raise ValueError("min_delta needs patience, and there is none: set patience, or leave min_delta out")
        return self

    @property
    def rule(self) -> EarlyStop | None:
        """Rule for the run's state machine; None: no early stop."""
        if not self.metric:
            return None
        metric = _metric_of(self.metric, self.source, self.mode)
        return EarlyStop(metric, self.patience or 0, self.min_delta or 0.0, self.target)


def faults_of_metrics(model: ModelConfig, stop: StopConfig, measures: "Measures") -> Iterator[str]:
    """Yield the fault of each metric that the task does not measure.

    Args:
        model: the settings of the run's versions.
        stop: the settings of the early stop.
        measures: the metrics that the task measures.
    """
    for table, name, metric in _watched(model, stop):
        key = f"{table}.{name}"
        if measures.names is not None and metric.name not in measures.names:
            allowed = ", ".join(measures.names) or "none, as the task measures nothing"
            yield f"{key}: got {metric.name!r}; allowed: {allowed}"
        elif metric.source == "server" and measures.why_not_here:
            clients = f'{table}.source = "clients" with evaluation.clients_every'
            yield f"{key}: got {metric.name!r} of the server, and {measures.why_not_here}; allowed: {clients}"


def _watched(model: ModelConfig, stop: StopConfig) -> Iterator[tuple[str, str, WatchedMetric]]:
    """Yield table, key and metric of each deciding metric."""
    if model.metric is not None:
        yield "model", "best", model.metric
    if stop.rule is not None:
        yield "stop", "metric", stop.rule.metric


def _check_unused(config: BaseModel, name: str, options: tuple[str, ...]) -> None:
    given = [] if getattr(config, name) else [option for option in options if getattr(config, option) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} without {name} has no effect: set {name}, or leave it out")


def faults_of_watching(model: ModelConfig, stop: StopConfig, *, every: Mapping[Source, int]) -> Iterator[str]:
    """Yield the fault of each metric that no evaluation measures.

    Args:
        model: the settings of the run's versions.
        stop: the settings of the early stop.
        every: the interval of the evaluations by the server and by the clients; 0: never.
    """
    for table, name, metric in _watched(model, stop):
        if not every[metric.source]:
            other: Source = "clients" if metric.source == "server" else "server"
            way_out = f"set it to 1 or more, or source = {other!r}" if every[other] else "set it to 1 or more"
            setting = f"evaluation.{metric.source}_every"
            yield f"{table}: {name} {metric.name!r} is measured by {setting}, which is 0: {way_out}"
