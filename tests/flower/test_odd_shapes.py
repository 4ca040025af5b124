"""Odd apps: each gives what Flower's own loop gives, hosted to the bit, or is refused by name."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: `make setup` installs it once it is in constraints.txt")

from flwr.app import Context, RecordDict

from atoll.flower.app import read_app
from atoll.flower.bench import metric_record, numbers_of
from atoll.flower.hosted.grid import as_program
from atoll.flower.native.strategies import native
from atoll.flower.server_host import ServerHost
from atoll.flower.task import FlowerTask
from atoll.protocol.settings import ConfigError
from atoll.simulations.federation.config import SimulationFile
from atoll.simulations.federation.run import opened
from atoll.task.apps import with_app
from atoll.task.json_text import to_json
from atoll.task.programs.grid import Grid
from tests.flower.flowers_own import GridHere, result_of
from tests.messages.strategies.hosted_here import LinkHere

APP = with_app(str(Path(__file__).parent / "apps" / "odd_shapes"))
SITES = ("node-0", "node-1")
KINDS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")

UNLIKE_STOCK = {"int64"}
"""Integers stay integers natively, where Flower turns them into floats."""

NOT_NATIVE = {
    "int8 and uint8": "a0 is int8: only",
    "uint32": "a0 is uint32: only",
    "bool": "a0 is bool: only",
    "complex": "a0 is complex64: only",
    "big endian": "a0 is >f4: only",
    "long double": "a0 is float128: only",
    "no array": "there is no array in the record",
    "many dimensions": "a0 has 13 dimensions: natively at most 8",
    "no number": "train_config: rate is not finite; train_config: rates is not finite",
    "bytes": "train_config: key has bytes",
    "list of bytes": "train_config: keys has bytes",
}
"""The reason for which an app has no native run."""

REFUSED = {
    "NaN weight": "'num-examples' in the metrics of a reply must be a number >= 0, got nan",
    "list of weights": "'num-examples' in the metrics of a reply must be a number >= 0, got [1, 2]",
    "two records of arrays": "a reply to train has one ArrayRecord, this one has 2 (arrays, second)",
    "two records of metrics": "a reply to train has one MetricRecord, this one has 2 (metrics, second)",
}
"""The reason for which the replies of all sites are refused in a native run, which ends at once."""

IS_LEFT_OUT = {"NaN weight", "infinite weight"}
"""Hosted, a weight that is not finite is an error of its node; stock Flower's model would be NaN."""


@pytest.fixture(scope="module")
def app():
    app = read_app(APP)
    app.load(app.serverapp)
    yield app
    sys.path.remove(str(app.folder))
    del sys.modules["odd_shapes_app"]


def _names():
    app = read_app(APP)
    app.load(app.serverapp)
    module = sys.modules.pop("odd_shapes_app")
    sys.path.remove(str(app.folder))
    return list(module.CASES)


def told(result):
    """A result as what can be compared, to the bit."""
    arrays = {key: (array.dtype, array.shape, array.data) for key, array in result.arrays.items()}
    return repr((arrays, [{n: dict(record) for n, record in getattr(result, kind).items()} for kind in KINDS]))


def in_order(trained):
    """The trainings of a run without the order of the nodes, which Flower draws; NaN is equal to itself."""
    return sorted(map(repr, trained))


def by_flower(app, case):
    """The result of Flower's own loop, or the error with which it ends."""
    module = sys.modules["odd_shapes_app"]
    module.results.clear()
    module.trained.clear()
    try:
        result_of(app, len(SITES), case=case)
    except Exception as error:
        return error, []
    return module.results.pop(), [*module.trained]


def hosted(app, case, folder):
    module = sys.modules["odd_shapes_app"]
    module.results.clear()
    module.trained.clear()
    given = {"case": case}
    as_program(app.load(app.serverapp), app.run_config(given))(Grid(LinkHere(app, SITES, folder, given)))
    return module.results.pop(), [*module.trained]


@pytest.mark.parametrize("case", [name for name in _names() if name not in IS_LEFT_OUT])
def test_hosted_an_odd_app_is_what_it_is_at_home(app, case, tmp_path):
    theirs, told_them = by_flower(app, case)
    if isinstance(theirs, Exception):
        with pytest.raises(type(theirs), match=re.escape(str(theirs))):
            hosted(app, case, tmp_path)
        return
    ours, told_us = hosted(app, case, tmp_path)
    assert told(ours) == told(theirs)
    assert in_order(told_us) == in_order(told_them), "the configs as the app has got them"


@pytest.mark.parametrize("case", sorted(IS_LEFT_OUT))
def test_hosted_what_is_not_finite_is_no_part_of_the_model(app, case, tmp_path):
    assert_finite(hosted(app, case, tmp_path)[0])


def assert_finite(ours):
    values = [array.numpy() for array in (ours.arrays or {}).values()]
    numbers = [value for kind in KINDS for record in getattr(ours, kind).values() for value in record.values()]
    assert all(np.isfinite(each).all() for each in [*values, *map(np.asarray, numbers)])


def natively(app, case, folder):
    """The result of a simulated native run with the configs that the app got, or the reason for none."""
    module = sys.modules["odd_shapes_app"]
    module.results.clear()
    given = {"case": case}
    plan = native(app, ServerHost(app, app.run_config(given)).started(), len(SITES))
    if plan.reasons:
        return "; ".join(plan.reasons), []
    file = SimulationFile.model_validate({"task": APP, "options": given, **plan.settings})
    module.trained.clear()
    try:
        with opened(file, FlowerTask(app, len(SITES)), folder, on_round=print, is_fresh=True) as federation:
            ended = federation.run()
    except ConfigError as error:
        return str(error), []
    if ended["state"] == "failed":
        assert len(module.trained) == len(SITES), "it ends with the first round"
        return ended["cause"], []
    return module.results.pop(), [*module.trained]


@pytest.mark.parametrize("case", _names())
def test_natively_an_odd_app_is_what_it_is_at_home_or_refused_by_name(app, case, tmp_path):
    theirs, told_them = by_flower(app, case)
    ours, told_us = natively(app, case, tmp_path / "run")
    if reason := NOT_NATIVE.get(case) or REFUSED.get(case):
        assert reason in ours
        assert case in NOT_NATIVE or "without program.native (--native) it runs hosted" in ours
        return
    if case in IS_LEFT_OUT:
        assert_finite(ours)
        return
    assert not isinstance(ours, str), ours
    assert in_order(told_us) == in_order(told_them), "each training once, with the same configs"
    assert list(ours.arrays) == list(theirs.arrays)
    for key, array in theirs.arrays.items():
        expected, found = array.numpy(), ours.arrays[key].numpy()
        assert found.shape == expected.shape
        assert case in UNLIKE_STOCK or found.dtype == expected.dtype
        tolerance = 1e-3 if case == "float16" else 1e-6
        size = np.linalg.norm(expected.astype(np.float64).ravel())
        assert np.linalg.norm((found.astype(np.float64) - expected).ravel()) <= tolerance * size, key
    for kind in KINDS:
        expected, found = (getattr(result, kind) for result in (theirs, ours))
        assert list(found) == list(expected), kind
        for number, record in expected.items():
            assert {*found[number]} == {*record}
            for name, value in record.items():
                np.testing.assert_allclose(found[number][name], value, rtol=1e-12)


def test_a_loop_of_the_apps_own_gets_all_records_as_at_home(app, tmp_path):
    module = sys.modules["odd_shapes_app"]
    config = app.run_config({})
    module.echoed.clear()
    module.echoing(GridHere(app, len(SITES), config), Context(1, 1, {}, RecordDict(), config))
    theirs = [*module.echoed]
    module.echoed.clear()
    as_program(module.echoing, config)(Grid(LinkHere(app, SITES, tmp_path)))
    assert len(theirs) == 2 * len(module.RECORDS)
    for expected, found in zip(theirs, module.echoed, strict=True):
        assert repr([as_plain(one) for one in found]) == repr([as_plain(one) for one in expected])


def as_plain(records):
    """Records without identities of objects; NaN is equal to itself."""
    return {
        name: {key: vars(item) if hasattr(item, "stype") else item for key, item in record.items()}
        for name, record in records.items()
    }


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"loss": 0.5, "acc": float("nan")},
        {"c": [float(n) for n in range(12)], "none": [], "recall[1]": 0.5, "a]": 1.0, "": 2.0, "b[0][1]": [3.0]},
        {"c[0]": 1.0, "c": [2.0], "c[0:0]": 3.0, "d[0]": []},
    ],
)
def test_metrics_travel_as_numbers_and_come_back(metrics):
    numbers = numbers_of(metrics)
    assert all(isinstance(number, float) for number in numbers.values())
    in_any_order = dict(sorted(numbers.items()))
    assert repr(sorted(dict(metric_record(in_any_order)).items())) == repr(sorted(metrics.items()))
    through_json = json.loads(to_json(in_any_order))
    through_json.pop("not_finite", None)
    assert repr(metric_record(through_json)) == repr(metric_record(in_any_order))
