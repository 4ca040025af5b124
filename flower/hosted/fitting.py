"""The replies that fit each other, for Flower's aggregation: a reply that does not fit becomes an error of its node.

One reply with a record or key that the others lack ends the run of a Flower strategy, and an array that is not finite
is averaged into the model. So in the process of a hosted `main()`, on each of its threads, the aggregations of Flower's
classes get an error in place of such a reply. A custom loop or aggregation of the app gets all replies unchanged. A
metric that is not finite changes no model: Flower's mean of it is NaN, and so it is here.
"""

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Error, Message, RecordDict
from flwr.common import parameters_to_ndarrays
from flwr.common.logger import log
from flwr.server import strategy as before_121
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from atoll.flower.hosted.replies import UNREADABLE, values_of

FAILED = 2
"""Flower's error code of an app that raised."""

_judging = threading.Event()
_inside = threading.local()
"""Whether the thread is in an aggregation whose replies were judged."""


@contextmanager
def only_fitting() -> Iterator[None]:
    """Pass Flower's aggregations in this process, during the block, only replies that fit each other."""
    _stand_in()
    _judging.set()
    try:
        yield
    finally:
        _judging.clear()


@functools.cache
def _stand_in() -> None:
    """Wrap the aggregations of Flower's classes, so that replies are judged first."""
    for module, names in ((flower, _OF_MESSAGES), (before_121, _OF_RESULTS)):
        for kind in filter(inspect.isclass, vars(module).values()):
            for name, fit in names.items():
                if name in vars(kind) and not inspect.isabstract(kind):
                    setattr(kind, name, _fitted(vars(kind)[name], fit))


def _fitted(original: Callable[..., Any], fit: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """Return an aggregation that gets the fitting replies; nested aggregations do not judge again."""

    @functools.wraps(original)
    def aggregate(strategy: Any, server_round: int, *given: Any, **named: Any) -> Any:
        if not _judging.is_set() or getattr(_inside, "is_judged", False):
            return original(strategy, server_round, *given, **named)
        bound = inspect.signature(original).bind(strategy, server_round, *given, **named)
        _inside.is_judged = True
        try:
            return original(strategy, server_round, *fit(strategy, *bound.args[2:]))
        finally:
            _inside.is_judged = False

    return aggregate


# ------------------------------------------------------------ messages


def _train(strategy: Any, replies: Any) -> tuple[list[Message]]:
    return (_fitting(strategy, list(replies), is_train=True),)


def _evaluate(strategy: Any, replies: Any) -> tuple[list[Message]]:
    return (_fitting(strategy, list(replies), is_train=False),)


_OF_MESSAGES = {"aggregate_train": _train, "aggregate_evaluate": _evaluate}


def _fitting(strategy: Any, replies: list[Message], *, is_train: bool) -> list[Message]:
    while isinstance(getattr(strategy, "strategy", None), flower.Strategy):  # a wrapper, as of differential privacy
        strategy = strategy.strategy
    of_metrics = getattr(strategy, f"{'train' if is_train else 'evaluate'}_metrics_aggr_fn", None)
    judge = _Judge(
        of_model={getattr(strategy, name, "") for name in ("weighted_by_key", "train_loss_key")},
        arrays=is_train,
        shapes=not isinstance(strategy, flower.FedXgbBagging | flower.FedXgbCyclic),  # trees are of any length
        metrics=of_metrics is aggregate_metricrecords,
    )
    found = {place: reply.content for place, reply in enumerate(replies) if reply.has_content()}
    for place, fault in judge.faults(found).items():
        make: Any = Message
        replies[place] = make(metadata=replies[place].metadata, error=Error(FAILED, fault))
    return replies


class _Judge:
    """Comparison of replies in the parts that an aggregation of Flower reads.

    Args:
        of_model: the names of the metrics that the model depends on, such as the weight.
        arrays: the records of arrays are read.
        shapes: the arrays are added.
        metrics: the values of all metrics are added by Flower, not by a custom function of the app.
    """

    def __init__(self, *, of_model: set[str], arrays: bool, shapes: bool, metrics: bool) -> None:
        self._of_model, self._arrays, self._shapes, self._metrics = of_model, arrays, shapes, metrics

    def faults(self, found: Mapping[int, RecordDict]) -> dict[int, str]:
        """Return the faults of replies by their place.

        The names and keys of records, and then the shapes, are compared with the majority's (more than half of the
        replies); without a majority no reply is wrong.
        """
        faults = {place: fault for place, records in found.items() if (fault := self._unsound(records))}
        for part, what in ((self._keys, "records or keys"), (self._forms, "shapes")):
            parts = {place: part(records) for place, records in found.items() if place not in faults}
            faults |= dict.fromkeys(unlike_most(parts), f"its reply has other {what} than most nodes")
        return faults

    def _unsound(self, records: RecordDict) -> str:
        for name, record in records.array_records.items() if self._arrays else ():
            for key, array in record.items():
                try:
                    if not _is_finite(values_of(array)):
                        return f"its reply has a value that is not finite: {name}.{key}"
                except UNREADABLE as error:
                    return f"its reply cannot be read: {error}"
        for name, numbers in records.metric_records.items():
            for key, value in numbers.items():
                if key in self._of_model and not _is_finite(np.asarray(value)):
                    return f"its reply has a value that is not finite: {name}.{key}"
        return ""

    def _counts(self, metric: str) -> bool:
        return self._metrics or metric in self._of_model

    def _keys(self, records: RecordDict) -> Hashable:
        arrays = records.array_records if self._arrays else {}
        return tuple(
            frozenset((name, frozenset(record)) for name, record in of_kind.items())
            for of_kind in (arrays, records.metric_records)
        )

    def _forms(self, records: RecordDict) -> Hashable:
        """Return the shapes of arrays, whether their elements add to real numbers, and the lengths of lists."""
        arrays = records.array_records if self._arrays and self._shapes else {}
        return (
            frozenset((name, key, _form(values_of(a))) for name, record in arrays.items() for key, a in record.items()),
            frozenset(
                (name, key, len(value) if isinstance(value, list) else None)
                for name, record in records.metric_records.items()
                for key, value in record.items()
                if self._counts(key)
            ),
        )


def _is_finite(values: "np.ndarray[Any, Any]") -> bool:
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def _form(values: "np.ndarray[Any, Any]") -> Hashable:
    return values.shape, "real" if values.dtype.kind in "biuf" else values.dtype.kind


def unlike_most(parts: Mapping[int, Hashable]) -> list[int]:
    """Return the places of parts that differ from the majority's; none without a majority."""
    if not parts:
        return []
    usual, number = Counter(parts.values()).most_common(1)[0]
    return [place for place, part in parts.items() if part != usual] if 2 * number > len(parts) else []


# ------------------------------------------------------------ results, the form before Flower 1.21


def _fit(strategy: Any, results: list[Any], failures: list[Any]) -> tuple[list[Any], list[Any]]:
    forms = dict[int, Hashable]()
    faults = dict[int, str]()
    for place, (_, result) in enumerate(results):
        try:
            forms[place] = _form_of_parameters(result.parameters)
        except UNREADABLE as error:
            faults[place] = str(error)
    faults |= dict.fromkeys(unlike_most(forms), "its parameters have other shapes than most nodes")
    return _without(faults, results, failures)


def _form_of_parameters(parameters: Any) -> Hashable:
    """Return the shapes of parameters; None: they are no numpy arrays.

    Raises:
        ValueError: they cannot be read, or are not finite.
    """
    if parameters.tensor_type != "numpy.ndarray":
        return None
    arrays = parameters_to_ndarrays(parameters)
    if not all(map(_is_finite, arrays)):
        raise ValueError("its parameters have a value that is not finite")
    return tuple(map(_form, arrays))


def _without(faults: Mapping[int, str], results: list[Any], failures: list[Any]) -> tuple[list[Any], list[Any]]:
    for place, fault in faults.items():
        log(WARNING, "node %s: %s", results[place][0].cid, fault)
    rest = [result for place, result in enumerate(results) if place not in faults]
    return rest, [*failures, *map(ValueError, faults.values())]


_OF_RESULTS = {"aggregate_fit": _fit}
