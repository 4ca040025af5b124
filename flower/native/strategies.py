"""Flower's strategies as settings of a run, for exactly these classes; a subclass is custom code of the app.

    FedAvg, FedProx                the exact weighted mean
    FedAvgM                        optimizer fedavgm
    FedAdagrad, FedAdam, FedYogi   optimizers of `flower.optimizers`: Flower's moments begin at 0, Adam corrects bias
    FedMedian                      rule median
    FedTrimmedAvg                  a rule of `flower.rules`: Flower's number of values that are left out
    Krum, MultiKrum, Bulyan        rules of `flower.rules`: Flower weighs the selected updates by their examples

A round has a number of clients here, no fraction: `fraction_train` becomes a cohort of `nodes` clients.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from atoll.flower.app import FlowerApp
from atoll.flower.native.terms import Terms, order_to_send
from atoll.flower.records import arrays_of, casts_of
from atoll.flower.server_host import Started
from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken

Settings = dict[str, Any]

WAITS_S = 366 * 86400.0
"""Seconds for which a round waits for its nodes, the allowed maximum: Flower waits without end."""

OURS = ("flwr.", "atoll.")

OPTIMIZERS, RULES = "atoll.flower.native.optimizers", "atoll.flower.native.rules"


@dataclass(frozen=True, slots=True)
class Native:
    """The settings of a native run, in which Atoll's rounds replace a ServerApp's strategy."""

    strategy: str
    """The class of the strategy."""
    settings: Settings
    """The tables of the run's TOML."""
    became: Mapping[str, str]
    """The settings that the app's values became, for a reader."""
    notes: tuple[str, ...] = ()
    """The differences of the native run from Flower's that remain."""
    reasons: tuple[str, ...] = field(default=())
    """The reasons why the app cannot run natively; empty: it can."""


def native(app: FlowerApp, started: Started, nodes: int) -> Native:
    """Translate a ServerApp's strategy into settings of a run, or list the reasons why that is impossible.

    Args:
        app: the app.
        started: the arguments of its `strategy.start`.
        nodes: the number of expected clients; 0: the strategy's `min_available_nodes`.
    """
    strategy: Any = started.strategy
    name = type(strategy).__name__
    if reasons := [*_reasons(app, started)]:
        return Native(name, {}, {}, reasons=tuple(reasons))
    nodes = nodes or int(strategy.min_available_nodes)
    trained = int(max(int(nodes * strategy.fraction_train), strategy.min_train_nodes))
    if reason := _why_not(strategy, trained, nodes):
        return Native(name, {}, {}, reasons=(reason,))
    settings, became = _round_of(strategy, started, nodes, trained)
    aggregation, optimizer, of_strategy = _TABLES[type(strategy)](strategy)
    settings |= {key: table for key, table in (("aggregation", aggregation), ("optimizer", optimizer)) if table}
    settings["local"] = _terms(strategy, started).table
    notes = (*_conditions(strategy), *_notes(started))
    return Native(name, _of_python(settings), became | of_strategy, notes)


def _why_not(strategy: Any, trained: int, nodes: int) -> str:
    """Return why a round with `trained` of the nodes has no counterpart in Atoll; empty: it has one."""
    if trained < 1:
        return f"fraction_train = {strategy.fraction_train:g} of {count_of(nodes, 'node')}: a round would train none"
    if isinstance(strategy, flower.MultiKrum) and strategy.num_nodes_to_select < trained:
        neighbours = trained - strategy.num_malicious_nodes - 2
        if neighbours < 2:
            few = f"num_malicious_nodes = {strategy.num_malicious_nodes} of {count_of(trained, 'node')}"
            return f"{few}: each is compared with only its nearest, and rounding in Flower decides the ties"
    return ""


def _of_python(value: Any) -> Any:
    """Return settings with Python numbers in place of numpy's."""
    if isinstance(value, dict):
        return {key: _of_python(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _reasons(app: FlowerApp, started: Started) -> Iterator[str]:
    strategy: Any = started.strategy
    if type(strategy) not in _TABLES:
        yield _why_not_listed(app, strategy)
        return
    yield from (f"{name} of {type(strategy).__name__} is replaced by the app" for name in changed_methods(strategy))
    yield from (f"{name} of {type(strategy).__name__} is set by the app" for name in _begun(strategy))
    if started.timeout_s is None:
        yield "timeout is None: natively a round has a deadline"
    yield from _of_options(strategy)
    for what, config in (("train_config", started.train), ("evaluate_config", started.evaluate)):
        yield from (f"{what}: {key} has bytes" for key, value in config.items() if _has(_is_bytes, value))
        yield from (f"{what}: {key} is not finite" for key, value in config.items() if _has(_is_not_finite, value))
    try:
        arrays_of(started.arrays)
    except TaskBroken as error:
        yield str(error)


def _of_options(strategy: Any) -> Iterator[str]:
    """Yield the options of a strategy that have no counterpart."""
    for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
        if getattr(strategy, name) is not aggregate_metricrecords:
            yield f"{name} is a custom function of the app"
    if isinstance(strategy, flower.Bulyan) and strategy.selection_rule.__name__ != "select_multikrum":
        yield "selection_rule is a custom function of the app"
    if isinstance(strategy, flower.MultiKrum) and strategy.num_nodes_to_select < 1:
        yield f"num_nodes_to_select is {strategy.num_nodes_to_select}: there would be no model"
    if getattr(strategy, "num_malicious_nodes", 0) < 0:
        yield f"num_malicious_nodes is {strategy.num_malicious_nodes}, a number below 0"
    if strategy.fraction_train == 0.0:
        yield "fraction_train is 0: there is no training"


def _begun(strategy: Any) -> Iterator[str]:
    """Yield the names of the state that a strategy has before the first round, such as its moments."""
    yield from (name for name in _KEPT if getattr(strategy, name, None) is not None)


def changed_methods(strategy: Any) -> Iterator[str]:
    """Yield the names of the methods of a Flower strategy that an app has replaced, in the object or its class."""
    for name in dir(type(strategy)):
        found = getattr(strategy, name)
        function = getattr(found, "__func__", found)
        is_method = inspect.isfunction(inspect.getattr_static(type(strategy), name, None))
        if is_method and not getattr(function, "__globals__", {}).get("__name__", "").startswith(OURS):
            yield name


def _why_not_listed(app: FlowerApp, strategy: Strategy) -> str:
    kind = type(strategy)
    if kind.__module__.startswith("flwr."):
        return f"{kind.__name__} has no counterpart here"
    base = next(base for base in kind.__mro__ if base.__module__.startswith("flwr."))
    return f"{kind.__name__} is a subclass of {base.__name__} in {_place(app, kind)}"


def _place(app: FlowerApp, kind: type) -> str:
    try:
        file, (_, line) = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return kind.__module__
    return f"{file.removeprefix(f'{app.folder}/')}:{line}"


def _has(is_one: Callable[[Any], bool], value: Any) -> bool:
    return any(map(is_one, value)) if isinstance(value, list) else is_one(value)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _round_of(strategy: Any, started: Started, nodes: int, cohort: int) -> tuple[Settings, dict[str, str]]:
    quorum, deadline = _fewest(strategy), float(started.timeout_s or 0.0)
    available = max(strategy.min_available_nodes, strategy.min_train_nodes, quorum, 1)
    round_: Settings = {"cohort_size": cohort, "quorum": quorum, "deadline": deadline, "failure_rest": 0.0}
    round_ |= {"min_available": available, "selection_timeout": WAITS_S}
    evaluation: Settings = {"server_every": 1 if started.evaluate_fn is not None else 0, "clients_every": 0}
    trained = f"fraction_train = {strategy.fraction_train:g} of {count_of(nodes, 'node')}"
    became = {
        f"num_rounds = {started.rounds}": f"rounds = {started.rounds}",
        f"{trained}, min_train_nodes = {strategy.min_train_nodes}": f"round.cohort_size = {cohort}",
        f"min_available_nodes = {strategy.min_available_nodes}": f"round.min_available = {available}: a round waits",
        f"timeout = {started.timeout_s:g}": f"round.deadline = {started.timeout_s:g}",
        "an error of a node": "round.failure_rest = 0: the next round asks it again",
    }
    asked = max(int(nodes * strategy.fraction_evaluate), strategy.min_evaluate_nodes)
    if strategy.fraction_evaluate > 0 and asked > 0:
        evaluation |= {"clients_every": 1, "clients_max": asked, "deadline": deadline}
        what = f"fraction_evaluate = {strategy.fraction_evaluate:g}, min_evaluate_nodes = {strategy.min_evaluate_nodes}"
        became[what] = f"evaluation.clients_every = 1, evaluation.clients_max = {asked}"
    if started.evaluate_fn is not None:
        became["evaluate_fn"] = "evaluation.server_every = 1"
    return {"rounds": started.rounds, "round": round_, "evaluation": evaluation}, became


def _fewest(strategy: Any) -> int:
    """Return the least number of replies that Flower aggregates: one, for Bulyan 4f + 3."""
    return 4 * strategy.num_malicious_nodes + 3 if isinstance(strategy, flower.Bulyan) else 1


def _terms(strategy: Any, started: Started) -> Terms:
    train = dict(started.train)
    if isinstance(strategy, flower.FedProx):
        train["proximal-mu"] = strategy.proximal_mu
    return Terms(
        ConfigRecord(train),  # raises for a value that Flower refuses, too
        ConfigRecord(dict(started.evaluate)),
        order_to_send(list(started.arrays)),
        casts_of(started.arrays),
        strategy.arrayrecord_key,
        strategy.configrecord_key,
        strategy.weighted_by_key,
    )


def _conditions(strategy: Any) -> Iterator[str]:
    """Yield the requirements of a native run on the ClientApp and the nodes that differ from Flower's loop."""
    weight = repr(strategy.weighted_by_key)
    yield f"a reply to train has all arrays of the model in their shapes, and {weight} above 0; else it does not count"
    yield "an error of a ClientApp leaves out that node in that round; one of form at all nodes ends the run"
    if strategy.fraction_evaluate > 0:
        yield "what evaluate changes in context.state does not stay; hosted, it does"


def _notes(started: Started) -> Iterator[str]:
    if started.evaluate_fn is not None:
        yield "what evaluate_fn keeps in memory is lost in a restart of the coordinator; hosted, it is computed again"
        yield "an error of evaluate_fn leaves out that value, and the rounds continue; hosted, strategy.start raises it"
    if isinstance(started.strategy, flower.MultiKrum | flower.Bulyan):
        yield "distances are between updates; Flower's, between float32 models, are rounded: near ties may differ"
        yield "the metrics of a training cover all nodes, Flower's only the selected ones"
    if isinstance(started.strategy, flower.FedAdam):
        yield "the model keeps its dtypes, where Flower's becomes float64"
    if casts := casts_of(started.arrays):
        some = ", ".join(f"{name} ({dtype})" for name, dtype in list(casts.items())[:3])
        yield f"sent as float32, and the app receives them in their own dtype: {some}"
    if whole := [name for name, array in started.arrays.items() if array.dtype.startswith(("int", "uint"))]:
        some = ", ".join(whole[:3])
        yield f"integers stay integers, with a rounded mean, where Flower turns them into floats: {some}"


_KEPT = ("current_arrays", "momentum_vector", "m_t", "v_t")

_Tables = tuple[Settings, Settings, dict[str, str]]


def _mean(strategy: Any) -> _Tables:
    became = {"proximal_mu": 'local."train.proximal-mu"'} if isinstance(strategy, flower.FedProx) else {}
    return {}, {}, became


def _momentum(strategy: Any) -> _Tables:
    rate, momentum = float(strategy.server_learning_rate), float(strategy.server_momentum)
    optimizer = {"name": "fedavgm", "lr": rate, "momentum": momentum} if momentum else {"name": "fedavg", "lr": rate}
    return {}, optimizer, {"server_learning_rate, server_momentum": f"optimizer.name = {optimizer['name']!r}"}


def _adaptive(strategy: Any) -> _Tables:
    options = {"lr": strategy.eta, "beta1": strategy.beta_1, "beta2": strategy.beta_2, "tau": strategy.tau}
    if isinstance(strategy, flower.FedAdagrad):
        del options["beta1"], options["beta2"]
    name = f"{OPTIMIZERS}:{type(strategy).__name__}"
    optimizer = {"name": name, "options": {key: float(value) for key, value in options.items()}}
    return {}, optimizer, {"eta, beta_1, beta_2, tau": f"optimizer.name = {name!r}, with its options"}


def _median(strategy: Any) -> _Tables:
    return {"rule": "median"}, {}, {"FedMedian": "aggregation.rule = 'median'"}


def _trimmed(strategy: Any) -> _Tables:
    share = f"{Decimal(repr(float(strategy.beta))):f}".replace(".", "_")
    rule = f"{RULES}:trimmed_mean_{share}"
    return {"rule": rule}, {}, {f"beta = {strategy.beta:g}": f"aggregation.rule = {rule!r}"}


def _krum(strategy: Any) -> _Tables:
    rule = f"{RULES}:krum_{strategy.num_malicious_nodes}_{strategy.num_nodes_to_select}"
    return {"rule": rule}, {}, {"num_malicious_nodes, num_nodes_to_select": f"aggregation.rule = {rule!r}"}


def _bulyan(strategy: Any) -> _Tables:
    rule = f"{RULES}:bulyan_{strategy.num_malicious_nodes}"
    return {"rule": rule}, {}, {"num_malicious_nodes": f"aggregation.rule = {rule!r}"}


_TABLES: dict[type, Callable[[Any], _Tables]] = {
    flower.FedAvg: _mean,
    flower.FedProx: _mean,
    flower.FedAvgM: _momentum,
    flower.FedAdagrad: _adaptive,
    flower.FedAdam: _adaptive,
    flower.FedYogi: _adaptive,
    flower.FedMedian: _median,
    flower.FedTrimmedAvg: _trimmed,
    flower.Krum: _krum,
    flower.MultiKrum: _krum,
    flower.Bulyan: _bulyan,
}
