"""Replies that are given to a strategy of Flower's, played again by the nodes of a simulated native run.

As a plugin of pytest (`-p tests.flower.replaying`), each `aggregate_train` of a strategy with a native
counterpart is compared with such a run; the test gets what Flower's own code returns.
"""

import functools
import inspect
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from flwr.serverapp import strategy as flower

from atoll.flower.app import read_app
from atoll.flower.native.strategies import native
from atoll.flower.server_host import ServerHost
from atoll.flower.task import FlowerTask
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.task.apps import with_app

APP = with_app(str(Path(__file__).parent / "apps" / "replayed"))
NATIVE = (
    *("FedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedProx"),
    *("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan"),
)
TOLERANCE = 1e-6
"""As in docs/flower.md: relative, each array."""


def natively(strategy, initial, replies, rounds, folder):
    """Return the arrays after rounds of a native run with the same replies in each, or why it would run hosted."""
    app = read_app(APP)
    module = app.load("replayed_app:given"), app.load("replayed_app:results")
    given, results = module
    sizes = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_train_nodes": 1, "min_available_nodes": 1}
    names = [name for name in inspect.signature(type(strategy).__init__).parameters if hasattr(strategy, name)]
    options = {name: getattr(strategy, name) for name in names} | sizes
    given |= {"strategy": type(strategy)(**options), "initial": initial, "replies": replies}
    config = {"rounds": rounds}
    plan = native(app, ServerHost(app, app.run_config(config)).started(), len(replies))
    if plan.reasons:
        return "; ".join(plan.reasons)
    file = SimulationFile.model_validate({"task": APP, "options": config, **plan.settings})
    with opened(file, FlowerTask(app, len(replies), config), folder, on_round=print, is_fresh=True) as federation:
        ended = federation.run()
    assert ended["state"] == "finished", ended
    return {name: array.numpy() for name, array in results.pop().arrays.items()}


def differing(found, expected):
    """Return the distances of the arrays that are further away than a native run may be, by name."""
    assert list(found) == list(expected)
    distances = {}
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        gap = np.linalg.norm((found[name].astype(np.float64) - array).ravel())
        if gap > TOLERANCE * max(np.linalg.norm(array.astype(np.float64).ravel()), 1.0):
            distances[name] = gap
    return distances


# ------------------------------------------------------------ the plugin

_seen = Counter()


@pytest.fixture(autouse=True)
def every_aggregation_is_played_again(monkeypatch):
    """Let each aggregation be compared with a native run."""
    for name in NATIVE:
        kind = getattr(flower, name)
        monkeypatch.setattr(kind, "aggregate_train", _compared(kind, kind.aggregate_train))


def _compared(kind, original):
    @functools.wraps(original)
    def aggregate_train(strategy, server_round, replies):
        if type(strategy) is not kind:  # a strategy that this one is a part of
            return original(strategy, server_round, replies)
        replies = list(replies)
        played = [_played(strategy, each.content) for each in replies if each.has_error() is not True]
        began = vars(strategy).setdefault("_began", _numbers(getattr(strategy, "current_arrays", None)))
        arrays, metrics = original(strategy, server_round, replies)
        if arrays is not None and played:
            began = began or {name: np.zeros_like(array) for name, array in played[0][0].items()}
            expected = {name: array.numpy() for name, array in arrays.items()}
            with pytest.MonkeyPatch.context() as own:
                own.setattr(kind, "aggregate_train", original)  # as a replaced one, it would be a reason to run hosted
                _compare(strategy, began, played, server_round, expected)
        return arrays, metrics

    return aggregate_train


def _played(strategy, content):
    (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
    return _numbers(arrays), metrics[strategy.weighted_by_key]


def _numbers(arrays):
    """Return arrays by name; integers as floats, of which Flower's own mean makes them."""
    found = {name: np.asarray(a.numpy() if hasattr(a, "numpy") else a) for name, a in (arrays or {}).items()}
    return {name: a.astype(np.float64) if a.dtype.kind in "iu" else a for name, a in found.items()}


def _compare(strategy, began, played, rounds, expected):
    with tempfile.TemporaryDirectory(prefix="atoll-replayed-") as folder:
        found = natively(strategy, began, played, rounds, Path(folder) / "run")
    if isinstance(found, str):
        _seen[f"hosted, {type(strategy).__name__}: {found}"] += 1
        return
    gaps = differing(found, expected)
    assert not gaps, f"natively {type(strategy).__name__} gives {found}, Flower's own code {expected}"
    _seen[f"native, {type(strategy).__name__}: within {TOLERANCE:g}"] += 1


def pytest_terminal_summary(terminalreporter):
    """Tell how each aggregation runs here."""
    for what, number in sorted(_seen.items()):
        terminalreporter.write_line(f"{number:4d}  {what}")
