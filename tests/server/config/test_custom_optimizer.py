"""The server optimizer of a user's own in the settings of a run: by reference or by a package's name, with options."""

import json
from pathlib import Path

import numpy as np
import pytest

from atoll.plugins.kind import AS_RECORDED
from atoll.protocol.settings import ConfigError, load_text
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.config.extensions import CUSTOM_OPTIMIZER
from atoll.server.config.kinds import SERVER_OPTIMIZERS
from atoll.server.config.run import RunConfig
from atoll.server.folding.method import Method
from tests.plugins.packages import install

CODE = '''
class Scaled:
    """x <- x + rate D."""

    def __init__(self, rate, offset=0.0):
        if rate <= 0:
            raise ValueError(f"rate must be positive, got {rate}")
        self.rate, self.offset = rate, offset

    def apply(self, master, mean, state):
        return master + self.rate * mean + self.offset


class Looking(Scaled):
    def prepare(self, gram):
        return 1.0


half = Scaled(0.5)
number = 3


def made(rate):
    return Scaled(2 * rate)


def useless():
    return object()
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "steps.py"
    path.write_text(CODE)
    return str(path)


def moved(config: OptimizerConfig) -> float:
    return float(config.build().apply(np.zeros(1), np.ones(1), {})[0])


def test_an_object_a_class_and_a_function(file: str) -> None:
    assert moved(OptimizerConfig(name=f"{file}:half")) == 0.5
    assert moved(OptimizerConfig(name=f"{file}:Scaled", options={"rate": 3.0, "offset": 1.0})) == 4.0
    assert moved(OptimizerConfig(name=f"{file}:made", options={"rate": 3.0})) == 6.0


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "half",
            {"rate": 1.0},
            "optimizer.options: it is an object and takes none; allowed: a class",
        ),
        ("Scaled", {}, "missing 1 required positional argument: 'rate'"),
        ("Scaled", {"rate": -1.0}, "Scaled: optimizer.options: rate must be positive, got -1.0"),
        ("Scaled", {"rate": 1.0, "speed": 2}, "unexpected keyword argument 'speed'"),
        ("useless", {}, "is of the type object; allowed: an object with a method `apply`"),
        ("number", {}, "is of the type int; allowed: an object with a method `apply`"),
        ("nothing", {}, "there is no nothing in"),
    ],
)
def test_what_makes_no_optimizer_is_refused_when_the_run_is_made(
    file: str, name: str, options: dict[str, float], sentence: str
) -> None:
    config = OptimizerConfig(name=f"{file}:{name}", options=options)
    with pytest.raises(ConfigError, match=sentence):
        Method.of(AggregationConfig(), config)
    assert Method.of(AggregationConfig(), config, is_over=True).slots == (), "a run that has ended is only shown"


def test_options_are_for_one_s_own_and_names_are_checked() -> None:
    with pytest.raises(ValueError, match="options are for a custom optimizer, and name is fedavg"):
        OptimizerConfig(options={"alpha": 1.0})
    with pytest.raises(ValueError, match=r'allowed: "fedavg" .* module:object'):
        OptimizerConfig(name="fedadamm")
    with pytest.raises(ValueError, match=r"lr is not an option of .*half .allowed: none"):
        OptimizerConfig(name="m:half", lr=0.5)
    assert set(CUSTOM_OPTIMIZER.built_in) == set(SERVER_OPTIMIZERS.variants)


def test_a_schedule_moves_an_option(file: str) -> None:
    text = f"""
task = "m:t"
rounds = 4
optimizer = {{name = {json.dumps(file + ":Scaled")}, options = {{rate = 8.0, offset = 1.0}}}}
schedule.optimizer.rate = {{kind = "exponential", factor = 0.5}}
"""
    run = load_text(RunConfig, text, name="run.toml")
    assert [run.optimizer_at(version).options for version in (1, 2)] == [
        {"rate": 8.0, "offset": 1.0},
        {"rate": 4.0, "offset": 1.0},
    ]
    assert moved(run.optimizer_at(2)) == 5.0
    with pytest.raises(ConfigError, match=r"optimizer.speed: no setting of .*Scaled .known: rate, offset"):
        load_text(RunConfig, text.replace("optimizer.rate =", "optimizer.speed ="), name="run.toml")


def test_what_looks_at_whole_updates_needs_their_exact_mean(file: str) -> None:
    config = OptimizerConfig(name=f"{file}:Looking", options={"rate": 1.0})
    Method.of(AggregationConfig(), config)
    for aggregation in (AggregationConfig(rule="median"), AggregationConfig(partial=True)):
        with pytest.raises(
            ConfigError, match="which reads whole updates and their exact mean: it cannot be combined with"
        ):
            Method.of(aggregation, config)


def test_an_optimizer_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"atoll.optimizers": {"scaled": "acme_steps:Scaled"}}
    install(tmp_path, "acme-steps", modules={"acme_steps": CODE}, points=points)
    text = 'task = "m:t"\noptimizer = {name = "scaled", options = {rate = 2.0}}\n'
    with pytest.raises(ConfigError, match="a server optimizer of a package has its name once the package is installed"):
        load_text(RunConfig, text, name="run.toml")
    recorded = load_text(RunConfig, text, name="", context=AS_RECORDED)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_text(RunConfig, text, name="run.toml") == recorded
    assert moved(recorded.optimizer) == 2.0
