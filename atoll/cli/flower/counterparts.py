"""The settings of a run as a strategy of Flower, for exactly those that give the same versions of the model. Pure.

    aggregation.rule mean             FedAvg; weighting "uniform" weighs every reply alike
    optimizer fedavg, fedavgm         FedAvg, FedAvgM
    Flower's steps (optimizers)       FedAdagrad, FedAdam, FedYogi
    rule median, trimmed_mean         FedMedian, FedTrimmedAvg
    Flower's rules (rules)            MultiKrum, Bulyan

It is the inverse of `flower.native.strategies`. A setting that changes when a round ends, and not what it computes,
is left out: Flower waits for all replies, or for the timeout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from atoll.ground.printable import count_of
from atoll.protocol.settings import ConfigError
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.config.model import run_and_version
from atoll.server.config.run import RunConfig

A_NUMBER = 1e-9
"""A fraction too small to count: the least number of nodes then is the number of a round."""

OPTIMIZERS, RULES = "atoll.flower.native.optimizers:", "atoll.flower.native.rules:"
ADAPTIVE = ("FedAdagrad", "FedAdam", "FedYogi")

Arguments = dict[str, Any]

_KEPT = {
    *("name", "task", "options", "rounds", "seed", "local", "schedule.local", "model.start", "model.strict"),
    *("model.frozen", "round.cohort_size", "round.min_available", "round.deadline", "evaluation.clients_every"),
    *("evaluation.clients_max", "evaluation.server_every", "aggregation.rule", "aggregation.malicious"),
    *("aggregation.weighting", "aggregation.device"),
}
"""Settings with a place in the app, and the device of a sum, which has the same bits anywhere."""

_OF_THE_VALUES = ("aggregation.", "cohort.", "optimizer.", "program.", "schedule.", "secure.", "round.mode")
"""Beginnings of settings that change the versions of the model; any other can be left out."""


@dataclass(frozen=True, slots=True)
class Counterpart:
    """Flower strategy with the same results as a run, and the run's settings that it leaves out."""

    strategy: str
    """The name of the class."""
    arguments: Mapping[str, Any]
    """The arguments of the class."""
    timeout: float
    """Seconds that a round waits for replies."""
    left_out: tuple[str, ...]
    """The settings without a counterpart that do not change the versions."""

    @property
    def steps(self) -> bool:
        """Return whether the strategy also applies an optimizer step to the model, including buffers and integers."""
        return self.strategy in ("FedAvgM", *ADAPTIVE)


def counterpart(config: RunConfig) -> Counterpart:
    """Translate a run's settings into the Flower strategy that gives the same model versions.

    Raises:
        ConfigError: settings that no Flower strategy has change the model; the message lists all of them.
    """
    changed = dict(_changed(config))
    strategy, arguments, faults = _strategy_of(config)
    allowed = _KEPT | {f"optimizer.{name}" for name in OptimizerConfig.model_fields}
    faults += [
        f"{key}: got {value!r}, which no strategy of Flower has: leave it out, or export without it and write a "
        "custom strategy in server_app.py"
        for key, value in changed.items()
        if key not in allowed and key.startswith(_OF_THE_VALUES)
    ]
    if run_and_version(config.model.start) is not None:
        faults.append(
            f"model.start: got {config.model.start!r}; allowed: a file: atoll model export writes one of a version"
        )
    if faults:
        raise ConfigError(faults)
    left_out = [f"{key} = {value!r}" for key, value in changed.items() if key not in allowed]
    if config.round.deadline == "adaptive":
        left_out.append("round.deadline = 'adaptive'")
    if config.evaluation.server_every > 1:
        left_out.append(f"evaluation.server_every = {config.evaluation.server_every}")
    if config.evaluation.clients_every > 1:
        left_out.append(f"evaluation.clients_every = {config.evaluation.clients_every}")
    return Counterpart(strategy, _of_the_round(config) | arguments, _timeout(config), tuple(left_out))


def _changed(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the settings that are not their defaults, by `table.name`."""
    for name in RunConfig.model_fields:
        value, default = getattr(config, name), RunConfig.model_fields[name].default
        if not isinstance(value, BaseModel):
            if value != default:
                yield name, value
            continue
        for field, declared in type(value).model_fields.items():
            found = getattr(value, field)
            if found != getattr(default, field, declared.default):  # of a table that is absent by default
                yield f"{name}.{field}", found


def _timeout(config: RunConfig) -> float:
    policy = config.round
    return policy.deadline_max if policy.deadline == "adaptive" else policy.deadline


def _of_the_round(config: RunConfig) -> Arguments:
    policy, evaluation = config.round, config.evaluation
    arguments: Arguments = {
        "fraction_train": A_NUMBER,
        "min_train_nodes": policy.cohort_size,
        "fraction_evaluate": 0.0,
        "min_available_nodes": max(policy.cohort_size, policy.min_available),
        "weighted_by_key": "uniform" if config.aggregation.weighting == "uniform" else "num-examples",
    }
    if evaluation.clients_every:
        asked = evaluation.clients_max
        arguments |= {"fraction_evaluate": A_NUMBER if asked else 1.0, "min_evaluate_nodes": asked or 1}
    return arguments


_Found = tuple[str, Arguments, list[str]]


def _strategy_of(config: RunConfig) -> _Found:
    """Return the class of a strategy, its arguments beyond FedAvg's, and the reasons why there is none."""
    aggregation, optimizer = config.aggregation, config.optimizer
    of_rule, of_optimizer = _rule(aggregation, config.round.cohort_size), _optimizer(optimizer)
    strategies = [found for found in (of_rule, of_optimizer) if found[0] != "FedAvg"]
    faults = [fault for found in (of_rule, of_optimizer) for fault in found[2]]
    if len(strategies) > 1 and not faults:
        faults.append(
            f"optimizer.name: got {optimizer.name!r} beside aggregation.rule {aggregation.rule!r}, and a strategy of "
            "Flower has one of them: leave one out"
        )
    strategy, arguments, _ = strategies[0] if strategies else ("FedAvg", {}, [])
    return strategy, arguments, faults


def _rule(aggregation: AggregationConfig, most: int) -> _Found:
    rule, share = aggregation.rule, aggregation.malicious
    if rule in ("mean", "median"):
        return {"mean": "FedAvg", "median": "FedMedian"}[rule], {}, []
    if rule == "trimmed_mean":
        if isinstance(share, float) and _trims_alike(share, most):
            return "FedTrimmedAvg", {"beta": share}, []
        fault = f"aggregation.malicious: got {share}, and Flower leaves out int(beta * n) of n updates"
        return (
            "FedTrimmedAvg",
            {},
            [f"{fault}; allowed: a fraction that gives the same number for 1 to {most}, such as 0.2"],
        )
    if found := re.fullmatch(re.escape(RULES) + r"trimmed_mean_(0(_\d+)?)", rule):
        return "FedTrimmedAvg", {"beta": float(found[1].replace("_", "."))}, []
    if found := re.fullmatch(re.escape(RULES) + r"krum_(\d+)_(\d+)", rule):
        malicious, selected = int(found[1]), int(found[2])
        if selected >= most or most - malicious - 2 >= 2:
            faults = []
        else:
            fault = (
                f"aggregation.rule: got {rule!r} of {count_of(most, 'update')}: each is compared with only its nearest"
            )
            way_out = f"allowed: at least {malicious + 4}, or all selected"
            faults = [f"{fault}, and rounding in Flower decides the ties; {way_out}"]
        return "MultiKrum", {"num_malicious_nodes": malicious, "num_nodes_to_select": selected}, faults
    if found := re.fullmatch(re.escape(RULES) + r"bulyan_(\d+)", rule):
        return "Bulyan", {"num_malicious_nodes": int(found[1])}, []
    allowed = f"mean, median, trimmed_mean, {RULES}krum_F_M, bulyan_F, trimmed_mean_0_25"
    return "FedAvg", {}, [f"aggregation.rule: got {rule!r}; Flower has a strategy for {allowed}"]


def _trims_alike(share: float, most: int) -> bool:
    """Return whether a fraction trims as many updates here as in Flower, for each number of updates up to `most`."""
    from atoll.aggregation.rules.rule import num_malicious

    return all(num_malicious(share, number) == int(share * number) for number in range(1, most + 1))


def _optimizer(optimizer: OptimizerConfig) -> _Found:
    name = optimizer.name
    momentum = {"fedavg": 0.0, "fedavgm": 0.9 if optimizer.momentum is None else optimizer.momentum}.get(name)
    if momentum is not None and not optimizer.nesterov:
        lr = 1.0 if optimizer.lr is None else optimizer.lr
        is_plain = lr == 1.0 and momentum == 0.0
        arguments = {} if is_plain else {"server_learning_rate": lr, "server_momentum": momentum}
        return "FedAvg" if is_plain else "FedAvgM", arguments, []
    if name.removeprefix(OPTIMIZERS) in ADAPTIVE and name.startswith(OPTIMIZERS):
        return name.removeprefix(OPTIMIZERS), _adaptive(name.removeprefix(OPTIMIZERS), optimizer.options), []
    what = f"{name!r} with nesterov" if optimizer.nesterov else repr(name)
    allowed = ", ".join(["fedavg", "fedavgm", *(OPTIMIZERS + each for each in ADAPTIVE)])
    return "FedAvg", {}, [f"optimizer.name: got {what}; Flower has a strategy for {allowed}"]


def _adaptive(name: str, options: Mapping[str, Any]) -> Arguments:
    from atoll.flower.native import optimizers

    made = getattr(optimizers, name)(**options)
    betas = {} if name == "FedAdagrad" else {"beta_1": made.beta1, "beta_2": made.beta2}
    return {"eta": made.lr, "tau": made.tau, **betas}
